"""Processes that share a GPU: whoever times is alone on it, and one may be lost."""

import fcntl
import multiprocessing
import os
import threading
import time

import pytest

from benchmarks.processes import turns
from benchmarks.processes.pool import CRASHED, TIMEOUT, Lost, outcomes
from benchmarks.processes.turns import WAITING, Turns


class Silent(Turns):
    def __init__(self, tmp_path):
        super().__init__(tmp_path / "gpu.lock")

    @property
    def queue_is_held(self) -> bool:
        with open(self.queue.name, "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


# The GPU is used by many, and timed on by one.


def comes_to_its_end(use, seconds: float = 10.0) -> bool:
    """In a thread, which is left behind where it does not."""
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_whoever_times_is_alone(tmp_path):
    one, two, stages, got = Silent(tmp_path), Silent(tmp_path), [], threading.Event()
    two.say = stages.append
    two.at("checking")

    def use():
        with two.shared():
            got.set()

    with one.alone():
        assert not comes_to_its_end(use, 0.1)
    assert got.wait(10)
    assert stages == ["checking", WAITING, "checking"] and two.waited >= 0.1


def test_inside_a_turn_nothing_is_waited_for(tmp_path):
    one, two = Silent(tmp_path), Silent(tmp_path)

    def use():
        with one.alone():
            threading.Thread(target=lambda: two.wait(fcntl.LOCK_EX), daemon=True).start()
            while not two.queue_is_held:
                time.sleep(0.01)
            with one.shared():
                pass

    assert comes_to_its_end(use)


def test_many_share(tmp_path):
    one, two = Silent(tmp_path), Silent(tmp_path)

    def use():
        with one.shared(), two.shared():
            pass

    assert comes_to_its_end(use)


def test_what_is_timed_while_compiling_is_alone(tmp_path):
    one, seen = Silent(tmp_path), []
    measured = turns.alone(lambda x: seen.append(one.depth) or x, one)
    assert measured(3) == 3 and seen == [1] and one.depth == 0


# Processes.


def job(what, pipe):
    pipe.send(("stage", "working"))
    if what == "dies":
        os._exit(3)
    if what == "hangs":
        time.sleep(60)
    if what == "waits":
        pipe.send(("stage", WAITING))
        time.sleep(0.6)
        pipe.send(("stage", "working"))
    pipe.send(("done", what.upper()))


@pytest.fixture
def fork():
    return multiprocessing.get_context("fork")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_lost_process_is_a_row_and_the_others_go_on(fork):
    jobs = ["fine", "dies", "hangs", "waits", "last"]
    found = dict(outcomes(jobs, job, 2, 0.4, context=fork))
    assert {k: found[k] for k in ("fine", "waits", "last")} == dict(
        fine="FINE", waits="WAITS", last="LAST"
    )
    assert found["dies"] == Lost(CRASHED, "exit status 3 while working")
    assert found["hangs"] == Lost(TIMEOUT, "after 0.4 s, while working")
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_begins_after_the_deadline_or_an_interruption(fork):
    assert not list(outcomes(["fine"], job, 2, 1.0, deadline=0.0, context=fork))
    with pytest.raises(KeyboardInterrupt):
        for _ in outcomes(["fine", "hangs"], job, 2, 60.0, context=fork):
            raise KeyboardInterrupt
    assert not multiprocessing.active_children()
