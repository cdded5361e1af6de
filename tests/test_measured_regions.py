"""Regions that are really compiled and run, on a CPU, and ranks that agree."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.measure import contest as contests
from fusion_backend.measure import gpu, timing
from fusion_backend.measure import judge as judging
from fusion_backend.measure.agree import Ranks
from fusion_backend.measure.contest import NotMeasurable, ResultsDiffer, contest
from fusion_backend.measure.store import Answer
from fusion_backend.measure.timing import Race
from fusion_backend.options import Options
from fusion_backend.reporting.records import GraphRecord
from tests.measured_cases import Block, as_on_a_gpu, cuts_of

# Contests.


@pytest.mark.parametrize("last", [(True, False), (False, False), (False, True), (True, True)])
def test_what_counts_as_a_gain_beside_a_convolution(last):
    """5 % where Inductor copies the image to channels-last, else 2 %. It copies the weight in the
    whole graph, too.
    """
    images, weights = (torch.channels_last if yes else torch.contiguous_format for yes in last)
    conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=weights)
    x = torch.randn(2, 4, 6, 6).to(memory_format=images)
    (cut,) = cuts_of(nn.Sequential(conv, nn.GroupNorm(2, 4)), x, only="group_norm")
    with contest(cut) as held:
        assert held.worth == (timing.WORTH if last[0] else contests.WORTH_OF_LAYOUT)


def attention_cut(**more):
    block = Block()
    (cut, *_) = cuts_of(block, torch.randn(2, 8, 16), only="attention", **more)
    return cut


@pytest.mark.parametrize("training", [False, True])
def test_a_contest_compiles_and_times_both(training):
    with torch.set_grad_enabled(training):
        cut = attention_cut()
    drawn = torch.get_rng_state()
    with contest(cut) as held:
        race, more = held.against(cut.region.sites, 0.2)
        values = len(held.plain.values)
    assert race.ratio > 0 and more == 0
    assert (
        values == len(cut.outputs) + len(cut.rows) + len(cut.grads) and bool(cut.grads) == training
    )
    assert torch.equal(drawn, torch.get_rng_state())
    assert not held.__dict__  # it holds no memory


def test_a_race_may_last_as_long_as_compiling_took(monkeypatch):
    """So that what compiles for long and is hard to time is not compiled again by each process."""
    lasts = []
    monkeypatch.setattr(contests, "race", lambda *args: lasts.append(args[3]))
    with contest(attention_cut()) as held:
        for least in (0.0, 30.0):
            monkeypatch.setattr(contests, "TIMING_S", least)
            held.against(held.cut.region.sites, 1e3)
        held.against(held.cut.region.sites, 0.5)
    assert 0.1 < lasts[0] < 30.0 and lasts[1] == 30.0 and 0.1 < lasts[2] <= 0.5


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("time", [True, False])
def test_both_are_generated_before_either_is_waited_for(time, monkeypatch):
    order = []
    for name in ("begun", "finished"):
        made = getattr(contests.Contest, name)

        def noted(self, given, name=name, made=made):
            order.append(name)
            return made(self, given)

        monkeypatch.setattr(contests.Contest, name, noted)
    cut = attention_cut()
    until = math.inf if time else contests.time.perf_counter()
    with contest(cut, cut.region.sites, until) as held:
        assert order == (["begun", "begun", "finished"] if time else ["begun", "finished"])
        held.against(cut.region.sites, 0.05)
        assert order.count("begun") == 2 and order[-1] == "finished"
        held.against(cut.region.sites, 0.05)  # what was begun is used once
        assert order.count("begun") == 3


@pytest.mark.usefixtures("eager_kernels")
def test_what_cannot_be_generated_ahead_fails_when_it_is_raced(monkeypatch):
    cut = attention_cut()
    graph = cut.graph

    def failing(chosen):
        if chosen:
            raise RuntimeError("no such kernel")
        return graph(chosen)

    monkeypatch.setattr(cut, "graph", failing)
    with contest(cut, cut.region.sites) as held:
        assert held.plain.values
        with pytest.raises(RuntimeError, match="no such kernel"):
            held.against(cut.region.sites, 0.05)


@pytest.mark.usefixtures("eager_kernels")
def test_what_is_computed_in_front_of_a_region_is_read_before_each_call():
    linear = nn.Linear(16, 16, bias=False)

    def fn(x, w):
        return F.layer_norm(linear(x) + linear(x + 1), (16,), w)

    (cut,) = cuts_of(fn, torch.randn(4, 16), torch.randn(16), only="add_layer_norm")
    with contest(cut) as held:
        names = {id(t): n.name for n, t in zip(cut.inputs, held.inputs, strict=True)}
        recent = [names[id(t)] for t in held.clock.recent]
    assert recent == ["linear", "linear_1"]  # and not the weight

    def residual(x):
        y = F.layer_norm(x, (16,))
        return y + linear(linear(y))

    (cut,) = cuts_of(residual, torch.randn(4, 16), only="layer_norm")
    assert "linear_1" in [n.name for n in cut.inputs]  # computed after the region
    with contest(cut) as held:
        assert not held.clock.recent


@pytest.mark.usefixtures("eager_kernels")
def test_beside_some_library_calls_a_gain_must_be_larger(monkeypatch):
    """What is copied to channels-last at the edge may be so already in the whole graph; a bias that
    Inductor adds is added in place.
    """
    norm, first = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)
    batch, layer, bare = nn.BatchNorm1d(8).eval(), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    seen = []
    monkeypatch.setattr(contests, "race", lambda *args: seen.append(args[4:]) or Race())
    x, y = torch.randn(2, 8, 9, 9), torch.randn(4, 8)
    cases = [(lambda x: norm(first(x)).sin(), x, "group_norm")]
    cases += [(lambda x: norm(x).sin(), x, "group_norm")]
    cases += [(lambda y: batch(layer(y)), y, "batch_norm")]
    cases += [(lambda y: batch(bare(y)), y, "batch_norm")]
    for fn, given, only in cases:
        (cut,) = cuts_of(fn, given, only=only)
        with contest(cut) as held:
            held.against(cut.region.sites, 0.1)
    assert [worth for worth, _ in seen] == [0.05, 0.02, 0.1, 0.02]
    assert all(decided is contests.decided for _, decided in seen)


@pytest.mark.parametrize("gain, verdict", [(1.04, "same"), (1.06, "faster")])
def test_what_a_gain_is_worth(gain, verdict):
    found = Race(0.05)
    for _ in range(20):
        found.add(gain, 1.0)
    assert found.verdict == verdict and found.no_faster == (verdict == "same")


@pytest.mark.usefixtures("eager_kernels")
def test_a_kernel_that_is_wrong_in_context_loses(monkeypatch):
    cut = attention_cut()
    wrong = cut.region.sites[0]
    q, k, v, *rest = wrong.call.args
    wrong.call.args = (k, k, v, *rest)
    with (
        contest(cut) as held,
        pytest.raises(ResultsDiffer, match="not those of Inductor.* of its norm"),
    ):
        held.against([wrong], 0.1)


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("lost", [False, True])
def test_a_gradient_that_goes_by_another_input_is_the_same(lost, monkeypatch, tmp_path):
    """Plain attention reads a bias with a mask, ours the bias; both are computed in front of it."""
    with as_on_a_gpu(monkeypatch, tmp_path):
        cut = biased_cut()
    bias = next(n for n in cut.inputs if n.meta["val"].shape[0] == 1)
    masked = next(n for n in cut.inputs if bias in n.all_input_nodes)
    assert {bias, masked} <= cut.grads
    with contest(cut) as held:
        if lost:  # ours gives the bias no gradient
            graph, at = cut.graph(cut.region.sites), cut.inputs.index(bias)

            def without(*given):
                return graph(*given[:at], given[at].detach(), *given[at + 1 :])

            held.begun = lambda chosen: lambda: without
        with pytest.raises(ResultsDiffer) if lost else contextlib.nullcontext():
            held.against(cut.region.sites, 0.1)


def biased_cut():
    table = nn.Embedding(15, 2)
    linear = nn.Linear(16, 32)

    def fn(x):
        at = torch.arange(8)
        bias = table(at[None, :] - at[:, None] + 7).permute(2, 0, 1)[None]
        causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None].expand(2, 1, 8, 8)
        bias = torch.where(causal, bias, torch.finfo(torch.float32).min)
        q = linear(x).view(2, 8, 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, bias, scale=1.0)

    x = torch.randn(2, 8, 16, requires_grad=True)
    (cut, *_) = cuts_of(fn, x, only="attention")
    return cut


def test_what_does_not_fit_is_not_measured(monkeypatch):
    def full(cut, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(contests, "made_up", full)
    with pytest.raises(NotMeasurable, match="not enough memory"), contest(attention_cut()):
        pass


def test_a_region_is_compiled_while_a_graph_is(monkeypatch):
    """Inside a compilation of Dynamo's, which must not notice."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    block, seen = Block(), []

    def backend(gm, inputs):
        before = {k: dict(v) for k, v in counters.items()}
        kernels = metrics.generated_kernel_count
        with contest(cut) as held:
            seen.append(held.against(cut.region.sites, 0.05)[0].ratio)
        assert {k: dict(v) for k, v in counters.items()} == before
        assert metrics.generated_kernel_count == kernels
        return gm.forward

    x = torch.randn(2, 8, 16, requires_grad=True)
    cut = attention_cut()
    torch._dynamo.reset()
    expected = block(x).sum()
    out = torch.compile(block, backend=backend)(x).sum()
    out.backward()
    torch.testing.assert_close(out, expected)
    assert seen and x.grad is not None


# Ranks.


def ranks(n):
    """n of them, as processes with one key-value store would be."""
    store, found = torch.distributed.HashStore(), []
    for rank in range(n):
        one = Ranks.__new__(Ranks)
        one.store, one.me = store, f"rank {rank}"
        found.append(one)
    return found


def test_one_rank_measures_and_all_take_its_answer():
    first, second, third = ranks(3)
    assert first.claim("k") and not second.claim("k") and first.claim("k")
    assert first.publish("k", "its answer") == "its answer"
    assert second.wait("k", "none", 5) == third.wait("k", "none", 5) == "its answer"
    assert second.claim("other")


def test_who_waits_too_long_decides_for_all():
    first, second, third = ranks(3)
    first.claim("k")
    assert second.wait("k", "none", 0.05) == "none"
    assert first.publish("k", "too late") == "none" and third.wait("k", "never", 0) == "none"


def test_ranks_that_ask_at_once_agree():
    found, together = [], ranks(8)

    def ask(rank):
        key = "k"
        if rank.claim(key):
            found.append(rank.publish(key, rank.me))
        else:
            found.append(rank.wait(key, "none", 5))

    threads = [threading.Thread(target=ask, args=(r,)) for r in together]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len({*found}) == 1 and found[0] != "none"


def test_a_process_by_itself_agrees_with_itself():
    alone = Ranks()
    answer = Answer("k", ("a",), ("",)).to_json()
    assert alone.claim("k") and alone.publish("k", answer) == answer and json.loads(answer)


def test_a_rank_that_died_is_waited_for_once(monkeypatch):
    dead, alive = ranks(2)
    waited = []
    one = judging.Judge(Options(measure_s=0), GraphRecord(0), False)
    one.ranks, one.own = alive, lambda c: pytest.fail("it was claimed")
    monkeypatch.setattr(judging, "unanswered", lambda c, why: Answer(c.key, (), (), why=why))
    wait = alive.wait
    alive.wait = lambda key, late, s: waited.append(s) or wait(key, late, min(s, 0.01))
    classes = [judging.Class(key, None, []) for key in "abc"]
    assert all(dead.claim(c.key) for c in classes)
    assert {a.why for a in one.answers(classes)} == {judging.LATE}
    assert waited == [60.0, 0.0, 0.0]


def test_two_processes_agree_through_a_file(tmp_path):
    def ranks_of(rank):
        one = Ranks.__new__(Ranks)
        one.store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        one.me = f"rank {rank}"
        return one

    long = "x" * 200_000
    child = os.fork()
    if child == 0:  # it claims, and dies without an answer to the second
        try:
            one = ranks_of(1)
            one.claim("first")
            one.claim("second")
            one.publish("first", long)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    one = ranks_of(0)
    assert not one.claim("first") and one.wait("first", "none", 5) == long
    assert not one.claim("second") and one.wait("second", "none", 0.05) == "none"
    assert one.claim("third") and one.publish("third", "mine") == "mine"


def held_by_a_child(cuda: torch.device) -> int:
    """A process that holds the lock, until it is killed or a few seconds have passed."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with gpu.alone(cuda, 1.0):
                os.write(told, b"x")
                time.sleep(5)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"x"
    return child


def test_a_lock_ends_with_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "lock_file", lambda device: str(tmp_path / "lock"))
    cuda = torch.device("cuda:1")
    child = held_by_a_child(cuda)
    try:
        with gpu.alone(cuda, 0.02) as had:
            assert not had
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with gpu.alone(cuda, 1.0) as had:
        assert had


def test_a_lock_is_given_back_though_a_child_has_its_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "lock_file", lambda device: str(tmp_path / "lock"))
    cuda = torch.device("cuda:0")
    with gpu.alone(cuda, 1.0):
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
    try:
        with gpu.alone(cuda, 0.1) as had:
            assert had
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# What runs on a GPU alone, with CUDA made up.


class Event:
    """An event of a GPU that is through after some questions."""

    questions = 0

    def __init__(self, enable_timing=False):
        self.asked = 0

    def record(self):
        pass

    def query(self):
        self.asked += 1
        return self.asked > Event.questions

    def elapsed_time(self, end):
        return 1.5


@pytest.fixture
def cuda(monkeypatch):
    """A device of type cuda, whose memory and events are made up."""
    answers = dict(
        Event=Event,
        synchronize=lambda device: None,
        memory_allocated=lambda device: 3 << 20,
        memory_reserved=lambda device: 5 << 20,
        mem_get_info=lambda device: (1 << 10, 1 << 30),
    )
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return torch.device("cuda", 0)


def test_a_region_must_fit_in_what_is_free_and_in_what_is_reserved(cuda, monkeypatch):
    cut = attention_cut()
    contests.check_memory(cuda, cut)  # 2 MB are reserved and not used
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    with pytest.raises(NotMeasurable, match="it takes up to .* GB to measure, and .* are free"):
        contests.check_memory(cuda, cut)


def test_the_gpu_is_waited_for_but_not_for_ever(cuda, monkeypatch):
    monkeypatch.setattr(Event, "questions", 3)
    contests.finished(cuda, 5.0)
    monkeypatch.setattr(Event, "questions", 1 << 60)
    with pytest.raises(NotMeasurable, match="it had not finished after 0 seconds"):
        contests.finished(cuda, 0.01)


def test_a_clock_flushes_the_cache_and_counts_what_waited_for_the_host(cuda, monkeypatch):
    ones, flushed = torch.ones, []
    monkeypatch.setattr(torch, "ones", lambda n, **how: ones(4))
    read, one = [], SimpleNamespace(sum=lambda: read.append(len(flushed)))
    one.detach = lambda: one
    clock = timing.Clock(cuda, [one])
    clock.buffer = SimpleNamespace(fill_=flushed.append, sum=lambda: None)
    monkeypatch.setattr(Event, "questions", 1)  # the call is queued before the GPU is there
    assert clock(lambda: None) == 1.5
    assert read == [timing.PRIME]  # after the cache was flushed
    assert (len(flushed), clock.prime, clock.exposed) == (timing.PRIME, timing.PRIME, 0)
    monkeypatch.setattr(Event, "questions", 0)  # the GPU is always there first
    assert clock(lambda: None) == 1.5
    assert (clock.prime, clock.exposed) == (timing.LONGEST, 1)
