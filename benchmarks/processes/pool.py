"""Processes that do a job each, so many at a time; one that dies or takes too long is only lost."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from benchmarks.processes.turns import WAITING

# Status of a job whose process took too long, or died.
TIMEOUT, CRASHED = "timeout", "crashed"
TICK_S = 0.5  # how often the limits are looked at
SECONDS_TO_END = 2  # of a process that has sent its result
PATIENCE = 5  # times the limit: how long a process may wait for the GPU


class Lost(NamedTuple):
    """A job without a result: status "timeout" or "crashed", and in which stage."""

    status: str
    note: str


@dataclasses.dataclass
class Running:
    """A process. Seconds in which it waited for the GPU do not count as used."""

    job: object
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    since: float
    stage: str = "starting"
    used: float = 0.0
    waited: float = 0.0

    def count(self) -> None:
        now = time.monotonic()
        if self.stage == WAITING:
            self.waited += now - self.since
        else:
            self.used += now - self.since
        self.since = now

    def news(self):
        """Its result or its loss; None while it goes on."""
        while self.pipe.poll():
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError):  # OSError: it died while it sent
                self.process.join()
                return Lost(CRASHED, f"exit status {self.process.exitcode} while {self.stage}")
            if kind == "done":
                return value
            self.count()
            self.stage = value
        return self

    def end(self) -> None:
        """At once, whatever it does; its locks end with it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def outcomes(
    jobs: Iterable,
    work: Callable,
    processes: int,
    limit: float,
    deadline: float = float("inf"),
    context=multiprocessing,
) -> Iterator[tuple[object, object]]:
    """(job, what `work(job, pipe)` sent as ("done", value), or Lost), as they come. A process has
    `limit` seconds, without those in which it waits; none is started after the deadline.
    """
    todo, running, over = iter(jobs), [], []
    try:
        while True:
            while len(running) < processes and time.monotonic() < deadline:
                job = next(todo, None)
                if job is None:
                    break
                running.append(started(job, work, context))
            if not running:
                return
            wait([one.pipe for one in running], TICK_S)
            for one in list(running):
                if (found := state(one, limit)) is not one:
                    running.remove(one)
                    if isinstance(found, Lost):
                        one.end()
                    else:
                        over.append(one)  # it ends by itself, while others go on
                    yield one.job, found
    finally:
        for one in over:
            one.process.join(SECONDS_TO_END)
        for one in running + over:
            one.end()


def started(job, work: Callable, context) -> Running:
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the pipe
    return Running(job, process, mine, time.monotonic())


def state(one: Running, limit: float):
    """The process itself while it goes on, otherwise what came of it."""
    found = one.news()
    if found is not one:
        return found
    one.count()
    if one.used > limit:
        return Lost(TIMEOUT, f"after {limit:g} s, while {one.stage}")
    if one.waited > PATIENCE * limit:
        return Lost(TIMEOUT, f"it waited {one.waited:.0f} s for the GPU")
    return one
