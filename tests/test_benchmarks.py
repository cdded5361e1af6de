"""The benchmarks measure what they say, and tell a wrong, a slow and a broken contender from the
others.
"""

import json
import time

import fusion_backend.patterns  # noqa: F401  (fills the registry)
import pytest
import torch

from benchmarks.measure import timing
from benchmarks.measure.accuracy import errors, wrong
from benchmarks.measure.counting import draws
from benchmarks.measure.timing import Clock, in_turn, verdict
from benchmarks.pages import pattern_text as table
from benchmarks.pattern_runs import measuring
from benchmarks.pattern_runs.contenders import CONTENDERS, TWIN
from benchmarks.pattern_runs.measuring import Bench, measure
from benchmarks.records import runs
from benchmarks.records.rows import (
    FAILED,
    OK,
    WRONG,
    BlockRow,
    CompareRow,
    Contender,
    Errors,
    Row,
    Spread,
)
from benchmarks.records.runs import Run
from benchmarks.workloads.listed import SMALL, WORK
from benchmarks.workloads.work import BF16, F32, Work

CPU = torch.device("cpu")
EAGER = {name: CONTENDERS[name] for name in ("eager", "inductor")}
ADD_MUL = Work("add_mul", dict(size=1000), F32)


@pytest.fixture(scope="module")
def bench():
    return Bench(Clock(CPU), copy_bytes_s=1e10, matrix_flops_s=1e11, rounds=3)


def row(name="add_mul f32 size=1", **fields) -> Row:
    given = dict(
        pattern="add_mul",
        case=dict(size=1),
        dtype="f32",
        train=False,
        linear=False,
        bytes=16,
        flops=2,
    )
    return Row(name, **given | dict(intensity=0.125, floor_ms=1e-3, contenders=[]) | fields)


# Counting


@pytest.mark.parametrize(
    "work, size, flops",
    [
        (ADD_MUL, 4 * 4 * 1000, 2 * 1000),
        (Work("add_mul_exp", dict(size=1000), BF16), 3 * 2 * 1000, 3 * 1000),
        (
            Work("gated_linear", dict(m=8, k=16, n=32), F32),
            4 * (8 * 16 + 2 * 16 * 32 + 8 * 32),
            None,
        ),
        # no line in PASSES: argument and result
        (Work("gated_act", dict(rows=8, n=10), F32), 4 * (160 + 80), None),
        (Work("gated_act", dict(rows=8, n=10), F32, True), 2 * 4 * (160 + 80), None),
        # int8, and in fp32 scales, the bias and the result; an operation a product, a scale, a sum
        (
            Work("dequantize_linear", dict(m=32, k=64, n=16), F32),
            32 * 64 + 64 * 16 + 4 * (32 + 16 + 16 + 32 * 16),
            2 * 32 * 64 * 16 + 3 * 32 * 16,
        ),
    ],
)
def test_bytes_and_operations(work, size, flops):
    assert work.bytes == size
    if flops is not None:
        assert work.flops == flops


def test_matrix_products_count_twice_their_volume():
    m, k, n = 64, 128, 256
    forward = Work("gated_linear", dict(m=m, k=k, n=n), F32).flops
    assert 4 * m * k * n < forward < 4 * m * k * n + 10 * m * n
    assert Work("gated_linear", dict(m=m, k=k, n=n), F32, True).flops > 3 * 4 * m * k * n


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    assert ADD_MUL.floor_ms(16e3, 2e3) == pytest.approx(1000)
    assert ADD_MUL.floor_ms(16e3, 2e2) == pytest.approx(10000)


@pytest.mark.parametrize("work", [*SMALL, *WORK], ids=lambda work: work.name)
def test_every_row_can_be_counted(work):
    assert work.bytes > 0 and work.flops > 0
    assert Work.from_json(work.to_json()) == work


# Results


def test_spread():
    found = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.n, found.median, found.mean, found.min, found.max) == (5, 3, 3, 1, 5)
    assert (found.q25, found.q75, found.iqr) == (2, 4, 2) and found.std == pytest.approx(
        1.58114, rel=1e-4
    )
    assert Spread.of([2.0]).iqr == 0


def test_a_run_survives_its_file(tmp_path):
    mine = Contender(
        "eager", kernel=Spread.of([1.0]), errors=Errors({"max": 0.5}, {"max": 2.0}, 0.25)
    )
    for kind, rows in (
        ("patterns", [row(contenders=[mine])]),
        ("block_size", [BlockRow("add_mul", "kernel", 128, 4, Spread.of([2.0, 2.0]), 1e9)]),
        (
            "compare",
            [CompareRow("add_mul", "same", Spread.of([1.0]), Spread.of([2.0]), 2.0, 1.9, 2.1)],
        ),
        ("other", [dict(a=1)]),
    ):
        run = Run(kind, dict(gpu=None), rows)
        run.save(tmp_path / "deep" / "run.json")
        assert Run.load(tmp_path / "deep" / "run.json") == run
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.json"]


def test_what_is_no_number_is_null_in_json(tmp_path):
    Run("other", {}, [dict(error=float("nan"), most=float("inf"))]).save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["rows"] == [dict(error=None, most=None)]


def test_without_patterns_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(runs, "patterns", list)
    with pytest.raises(SystemExit, match="pip install -e ."):
        runs.machine(CPU, "benchmarks.models")


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no run"):
        Run.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"kind": "patterns", "rows": [{"later": 1}]}')
    with pytest.raises(ValueError, match="another version of benchmarks.patterns: .*'later'"):
        Run.load(tmp_path / "x.json")


# Accuracy


def test_percentiles_of_errors():
    exact = torch.full((1000,), 2.0, dtype=torch.float64)
    got = exact.float().clone()
    got[:20] += 0.5
    got[0] += 1.5
    found = errors([got], [exact])
    assert found.absolute == {"50": 0, "99": 0.5, "99.9": 0.5, "max": 2.0}
    assert found.relative["max"] == 1.0 and found.relative["99"] == 0.25
    assert found.distance == pytest.approx((19 * 0.25 + 4) ** 0.5 / (4 * 1000) ** 0.5)


def test_percentiles_of_a_sample_agree_with_those_of_all():
    exact = torch.arange(1, 6_000_001, dtype=torch.float64)
    found = errors([exact * 1.5], [exact])
    assert (
        found.absolute["99"] == pytest.approx(0.5 * 0.99 * 6e6, rel=1e-3)
        and found.absolute["max"] == 3e6
    )


def test_of_integers_the_share_that_differs():
    exact = torch.arange(100)
    assert errors([torch.where(exact < 3, exact + 1, exact)], [exact]).distance == pytest.approx(
        0.03
    )


def off(exact, where, by):
    got = exact.float()
    got[where] += by
    return got


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda e: e.float(), ""),
        (lambda e: e.float() * (1 + 1e-7), ""),
        (lambda e: off(e, 17, 0.01), "from fp64"),  # one element of a thousand
        (lambda e: off(e, 17, float("nan")), "not finite"),
        (lambda e: e.float()[:-1], "is (999,)"),
        (lambda e: e.bfloat16(), "torch.bfloat16, not"),
    ],
)
def test_a_wrong_result_is_told_from_a_rounded_one(change, said):
    exact = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    found = wrong([change(exact)], [exact.float()], [exact])
    assert said in found if said else not found


def test_integers_may_round_the_other_way_and_no_more():
    exact = torch.arange(10000)
    assert not wrong([off(exact, 5, 1).long()], [exact], [exact])
    assert "by up to 2" in wrong([off(exact, 5, 2).long()], [exact], [exact])
    assert "0.20% of the integers" in wrong([off(exact, slice(20), 1).long()], [exact], [exact])


# Times


def test_contenders_take_turns_and_a_long_call_gets_fewer():
    order, fresh = [], []
    calls = {
        "a": lambda args: order.append("a"),
        "b": lambda args: (order.append("b"), time.sleep(0.03)),
    }
    times = in_turn(calls, lambda: fresh.append(1) or [], Clock(CPU), rounds=2)
    assert len(times["a"]) == 2 * timing.CALLS[1] and len(times["b"]) == 2 * timing.CALLS[0]
    assert order[2:] == ["a"] * 10 + ["b"] * 4 + ["a"] * 10 and len(fresh) == 2


def test_a_call_that_the_gpu_had_to_wait_for_is_repeated_with_more_in_front():
    clock, tried = Clock(CPU), []
    clock.buffer = torch.ones(1)

    def once(call):
        tried.append(clock.prime)
        return 1.0, clock.prime < 16

    clock.once = once
    assert clock(lambda: None) == 1.0 and tried == [4, 8, 16] and clock.exposed == 0
    clock.once = lambda call: (2.0, True)
    assert clock(lambda: None) == 2.0 and clock.exposed == 1


@pytest.mark.parametrize(
    "mine, twins, said",
    [
        (1.0, 0.0, ""),
        (1.009, 0.0, ""),
        (1.05, 0.0, "slower"),
        (0.95, 0.0, "faster"),
        (1.05, 0.06, ""),
    ],
)
def test_a_difference_must_be_beyond_the_noise(mine, twins, said):
    assert verdict(Spread.of([mine] * 9), Spread.of([1.0] * 9), twins) == said


def test_scattered_times_prove_nothing():
    assert verdict(Spread.of([0.5, 1.1, 2.0]), Spread.of([0.5, 1.0, 2.0]), 0.0) == ""


# Contenders


class CountingClock(Clock):
    """A call takes 1 ms, and one that says `slow` three: whatever else the machine does."""

    def __init__(self):
        super().__init__(CPU)
        self.slow = False

    def __call__(self, call):
        self.slow = False
        call()
        return 3.0 if self.slow else 1.0


def tampered(kind, clock):
    def make(reference):
        def fn(*args):
            clock.slow |= kind == "slow"
            if kind == "raising":
                raise RuntimeError("broken\non purpose")
            return reference(*args) * (1.001 if kind == "wrong" else 1.0)

        return fn

    return make


def test_the_harness_checks_itself(bench, monkeypatch):
    monkeypatch.setattr(timing, "CALLS", (3, 3))
    clock = CountingClock()
    makers = EAGER | {kind: tampered(kind, clock) for kind in ("wrong", "slow", "raising")}
    found = measure(ADD_MUL, bench._replace(clock=clock), makers)
    assert [c.status for c in found.contenders] == [OK, OK, WRONG, OK, FAILED, OK]
    assert found.of("slow").verdict == "slower" and found.ratio("slow") < 0.5
    assert found.of("raising").note == "RuntimeError: broken" and found.of("raising").kernel is None
    assert (
        found.of("eager").errors.absolute["max"] < 1e-6 < found.of("wrong").errors.absolute["max"]
    )
    assert found.noise is not None and found.of(TWIN).kernel.n == found.of("inductor").kernel.n
    run = Run("patterns", dict(noise=table.noise_of([found])), [found])
    assert table.honest(run.rows) == 1
    shown = table.text(found) + table.summary(run)
    assert (
        "WRONG: result 0 is" in shown
        and "FAILED: RuntimeError: broken" in shown
        and "noise: Inductor" in shown
    )


def test_what_cannot_be_timed_keeps_its_errors(bench, monkeypatch):
    monkeypatch.setattr(measuring, "whole_calls", lambda *_: 1 / 0)
    found = measure(ADD_MUL, bench, {"eager": CONTENDERS["eager"]}).of("eager")
    assert found.errors and (found.status, found.note) == (
        FAILED,
        "not timed: ZeroDivisionError: division by zero",
    )


def test_who_fails_in_its_turn_leaves_the_others_alone(bench):
    def make(reference):
        calls = []

        def fn(*args):
            calls.append(1)
            if len(calls) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return reference(*args)

        return fn

    found = measure(ADD_MUL, bench, EAGER | {"late": make})
    assert [c.status for c in found.contenders] == [OK, OK, FAILED, OK] and found.of(
        "late"
    ).kernel is None
    assert (
        found.of("late").note.startswith("in its turn: out of memory (") and found.noise is not None
    )


def test_what_would_be_the_same_code_is_not_timed_again(bench, monkeypatch):
    site = dict(pattern="add_mul", fused=True, reason="", forward="kernel", backward=None)
    monkeypatch.setattr(measuring, "sites", lambda pattern: ([site], ""))
    makers = {name: CONTENDERS["eager"] for name in ("eager", "fusion", "fusion-always")}
    assert [c.name for c in measure(ADD_MUL, bench, makers).contenders] == ["eager", "fusion"]
    for other in (dict(forward="reference"), dict(fused=False), dict(pattern="add_mul_exp")):
        before, _ = dict(site), site.update(other)
        assert len(measure(ADD_MUL, bench, makers).contenders) == 3
        site.update(before)
    del makers["fusion"]
    assert [c.name for c in measure(ADD_MUL, bench, makers).contenders] == [
        "eager",
        "fusion-always",
    ]


def test_rates_follow_from_counts(bench):
    found = measure(ADD_MUL, bench, {"eager": CONTENDERS["eager"]})
    mine = found.of("eager")
    assert mine.rate_bytes == pytest.approx(found.bytes / mine.kernel.median * 1e3)
    assert mine.of_copy == pytest.approx(mine.rate_bytes / 1e10)
    assert (
        found.intensity == found.flops / found.bytes
        and found.noise is None
        and found.ratio("eager") is None
    )


def test_random_results_are_compared_under_the_mask_that_was_drawn(bench):
    assert not draws(torch.add, [torch.ones(3, device="meta")] * 2)

    def unscaled(reference):
        return lambda x, residual, p: reference(x, residual, p) * (1 - p)

    work = Work("dropout_add", dict(rows=4, n=64), F32, train=True)
    found = measure(work, bench, EAGER | {"unscaled": unscaled})
    assert found.of("eager").status == OK and found.of("eager").errors.distance < 1e-6
    assert found.of("unscaled").status == WRONG, found.of("unscaled")


def test_a_mask_that_no_result_shows_leaves_no_errors(bench):
    work = Work("dropout_mlp", dict(m=8, k=16, n=24, o=8), BF16, train=True)
    found = measure(work, bench, EAGER)
    assert found.note == "random: no errors"
    assert found.of("eager").status == OK and found.of("eager").errors is None


def test_what_the_gate_did_is_told(bench):
    names = ("eager", "inductor", "fusion", "fusion-always")
    found = measure(
        Work("rms_norm", dict(rows=8, n=64), F32, train=True),
        bench,
        {name: CONTENDERS[name] for name in names},
    )
    assert all(c.status == OK for c in found.contenders), [c.note for c in found.contenders]
    if not torch.cuda.is_available():
        assert found.of("fusion").declined == "the kernel needs CUDA tensors"
        assert "DECLINED: the kernel needs CUDA tensors" in table.text(found)
    assert not found.of("fusion-always").declined and found.of("fusion-always").sites[0]["fused"]
    x, weight, mean = 8 * 64 * 4, 64 * 4, 8 * 4
    # eager keeps what lies between as well
    assert found.of("inductor").saved_bytes == x + weight + mean
    assert found.of("eager").saved_bytes > 2 * x
