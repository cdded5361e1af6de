"""The code of the next class is generated while the kernels of the one before are compiled."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.measure import contest as contests
from fusion_backend.measure import measuring
from fusion_backend.measure import store as stored
from fusion_backend.measure.timing import Race
from tests.measured_cases import Stub, as_on_a_gpu, decided, long_norm, norm, told

SHAPES = [(2, 2, 64, 8), (2, 2, 32, 8), (2, 2, 16, 8)]  # the most valuable first


def causal(q):
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def attentions(*qs):
    return [causal(q) for q in qs]


def tensors():
    return [torch.randn(shape) for shape in SHAPES]


@pytest.fixture(autouse=True)
def certain(monkeypatch):
    """Every race is won, however busy the machine is."""

    def race(plain, ours, clock, seconds, worth, decided):
        found = Race(worth)
        for _ in range(20):
            found.add(2.0, 1.0)
        return found

    monkeypatch.setattr(contests, "race", race)


@pytest.fixture
def steps(monkeypatch):
    """(what is done, the length of the sequence of the region), in order."""
    found = []

    def noted(name):
        made = getattr(contests.Contest, name)

        def step(self, *given):
            found.append((name, self.inputs[0].shape[2]))
            return made(self, *given)

        monkeypatch.setattr(contests.Contest, name, step)

    for name in ("begun", "start", "against"):
        noted(name)
    return found


def test_one_class_ahead(steps, monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path):
        record = decided(attentions, *tensors(), gate="measure")
    assert record.measured == 3
    own = [("begun", 64), ("begun", 64)]  # as it is, and with its site replaced
    following = [("begun", 32), ("begun", 32)]
    assert steps[:6] == [*own, *following, ("start", 64), ("against", 64)]
    last = [("begun", 16), ("begun", 16), ("start", 32)]
    assert steps[steps.index(("begun", 16)) :][:3] == last
    # nothing is generated twice
    assert steps.count(("start", 16)) == 1 and steps.count(("start", 32)) == 1
    before = steps[: steps.index(("start", 16))]
    assert before.count(("begun", 16)) == 2


def test_what_has_an_answer_is_passed_over(steps, monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path):
        decided(causal, tensors()[1], gate="measure")
        steps.clear()
        record = decided(attentions, *tensors(), gate="measure")
    assert record.measured == 2
    assert 32 not in {length for _, length in steps}
    assert steps.index(("begun", 16)) < steps.index(("start", 64))


def test_what_cannot_be_generated_ahead_is_generated_when_its_turn_comes(
    steps, monkeypatch, tmp_path
):
    made_up, tried = contests.made_up, []

    def full_at_first(cut, device):
        length = cut.inputs[0].meta["val"].shape[2]
        tried.append(length)
        if tried.count(length) == 1 and length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made_up(cut, device)

    monkeypatch.setattr(contests, "made_up", full_at_first)
    with as_on_a_gpu(monkeypatch, tmp_path):
        record = decided(attentions, *tensors(), gate="measure")
        assert len(list(stored.store().all())) == record.measured == 3
    assert tried == [64, 32, 32, 16]


@pytest.fixture
def timed(monkeypatch):
    """Contests of which only the generation of code takes time, as the list says."""
    clock, generating = [0.0], []

    class Timed(Stub):
        def __init__(self, *given, **more):
            super().__init__(lambda chosen: 1.0, replaced=raced)
            clock[0] += generating.pop(0)

        def start(self):
            pass

    raced: list = []
    monkeypatch.setattr(contests, "Contest", Timed)
    monkeypatch.setattr(measuring, "Contest", Timed)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    return generating, raced


def norms_measured(timed, seconds, monkeypatch, tmp_path):
    """The length of each norm that was raced, for such times to generate code."""
    generating, raced = timed
    generating += seconds
    with as_on_a_gpu(monkeypatch, tmp_path), monkeypatch.context() as m:
        m.setattr(measuring, "contest", contests.contest)
        norms = [torch.randn(n, 4096, requires_grad=True) for n in (8192, 4096)]
        record = decided(lambda *xs: [norm(x) for x in xs], *norms, measure_s=20)
        took = measuring.ALLOWANCE.took
    assert took == [*seconds][: len(took)] and record.measure_s == sum(took)
    return [chosen[0].match.roots[0].meta["val"].shape[0] for chosen in raced]


def test_time_is_counted_for_the_class_that_it_is_spent_on(timed, monkeypatch, tmp_path):
    """Each norm is raced twice within half of the 20 seconds: the first one after 1 second, the
    second one after 9, or once after 12.
    """
    assert norms_measured(timed, [1, 8], monkeypatch, tmp_path / "a") == [8192] * 2 + [4096] * 2
    timed[1].clear()
    assert norms_measured(timed, [1, 11], monkeypatch, tmp_path / "b") == [8192] * 2 + [4096]


def test_after_the_time_of_the_graph_nothing_is_generated_ahead(timed, monkeypatch, tmp_path):
    """In training the first class has used up half of the 20 seconds."""
    assert norms_measured(timed, [11, 1], monkeypatch, tmp_path) == [8192]
    assert timed[0] == [1]


def test_two_classes_must_fit_together(monkeypatch, tmp_path):
    asked, check = [], contests.check_memory

    def noted(device, *cuts):
        asked.append([cut.inputs[0].meta["val"].shape[2] for cut in cuts])
        check(device, *cuts)

    monkeypatch.setattr(contests, "check_memory", noted)
    with as_on_a_gpu(monkeypatch, tmp_path):
        decided(attentions, *tensors(), gate="measure")
    assert asked == [[64], [32, 64], [16, 32]]


def test_what_is_generated_for_nothing_is_forgotten(monkeypatch, tmp_path):
    """The first class used up the time."""
    made = []

    class Slow(Stub):
        def against(self, chosen, seconds):
            measuring.ALLOWANCE.spend(20)
            return super().against(chosen, seconds)

    class Next(Stub):
        def __init__(self, *given, **more):
            made.append(self)
            super().__init__(lambda chosen: pytest.fail("measured"))

    @contextlib.contextmanager
    def contest(cut, first, until, begun, meanwhile):
        assert begun is None
        meanwhile()
        yield Slow(lambda chosen: 2.0)

    with as_on_a_gpu(monkeypatch, tmp_path), monkeypatch.context() as m:
        m.setattr(measuring, "contest", contest)
        m.setattr(measuring, "Contest", Next)
        record = decided(attentions, *(t.repeat(16, 16, 4, 4) for t in tensors()), measure_s=20)
    assert record.measured == 1 and len(made) == 1
    assert sum("are used up" in reason for _, _, reason in told(record, "attention")) == 2


def test_what_has_been_generated_is_raced_however_little_time_is_left(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0) as stub:
        stub.compile_s = 21.0
        monkeypatch.setattr(Stub, "generated", lambda self, chosen: True)
        ((_, fused, _),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert fused and stub.asked == [["layer_norm"]]
