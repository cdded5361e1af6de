"""The command benchmarks.patterns: its table and file, what it is asked for, and
compiling ahead.
"""

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import fusion_backend.patterns  # noqa: F401  (fills the registry)
import pytest
import torch

from benchmarks import patterns
from benchmarks.measure.timing import Clock
from benchmarks.pages import pattern_text as table
from benchmarks.pages.quoted import quoted_names
from benchmarks.pattern_runs import compiling, planning
from benchmarks.pattern_runs.contenders import gradients_for
from benchmarks.pattern_runs.measuring import Bench, measure
from benchmarks.records.runs import Run
from benchmarks.reproduce import PAGES
from benchmarks.workloads.listed import SMALL, WORK
from benchmarks.workloads.selection import selected, spread
from benchmarks.workloads.work import F32, Work
from fusion_backend.measure.allowance import ALLOWANCE
from fusion_backend.options import Options
from tests.test_benchmarks import EAGER, row

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench():
    return Bench(Clock(torch.device("cpu")), copy_bytes_s=1e10, matrix_flops_s=1e11, rounds=3)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_has_the_whole_time_for_its_measurements(bench, monkeypatch, ahead):
    left = []

    def plain(reference):
        left.append(ALLOWANCE.left(Options(measure_s=20.0)))
        return reference

    work, makers = Work("add_mul", dict(size=1000), F32), {"fusion": plain}
    monkeypatch.setattr(ALLOWANCE, "took", [])
    monkeypatch.setitem(compiling.CONTENDERS, "fusion", plain)
    for _ in range(2):
        compiling.warm(work, ["fusion"]) if ahead else measure(work, bench, makers)
        ALLOWANCE.spend(19.0)
    assert left == [20.0, 20.0]


def run_patterns(*argv) -> int:
    return patterns.main(
        [*argv, "--jobs", "0", "--rounds", "1", "--contenders", "eager", "inductor"]
    )


SIZED = ["--only", "add_mul", "quantize_int8", "--sizes", "size=1000", "size=2000"]


def test_a_table_and_its_file(tmp_path, capsys):
    assert run_patterns(*SIZED, "--out", str(tmp_path / "run.json")) == 0
    run = Run.load(tmp_path / "run.json")
    assert len(run.rows) == 4 and all(r.of("inductor").kernel for r in run.rows)
    assert (
        run.about["noise"]["rows"]
        and run.about["copy_bytes_s"] > 0
        and run.about["matrix_flops_s"] > 0
    )
    assert run.about["command"].startswith("python -m benchmarks.patterns")
    printed = capsys.readouterr().out
    assert "noise: Inductor's code timed twice" in printed and "say nothing about a GPU" in printed


def test_time_that_is_up_ends_it_cleanly(tmp_path, capsys):
    assert run_patterns(*SIZED, "--minutes", "0.0001", "--out", str(tmp_path / "run.json")) == 0
    run = Run.load(tmp_path / "run.json")
    assert len(run.rows) == 1 and run.about["stopped"] == "time is up after 1 of 4 rows"


def test_an_interrupt_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    found = iter([row()])
    monkeypatch.setattr(planning, "one", lambda *_: next(found, None) or stop())

    def stop():
        raise KeyboardInterrupt

    assert run_patterns(*SIZED, "--out", str(tmp_path / "run.json")) == 130
    assert len(Run.load(tmp_path / "run.json").rows) == 1
    assert "interrupted after 1 of 4 rows" in capsys.readouterr().out


def test_work_that_cannot_be_done_is_a_line(bench):
    found = planning.one(Work("gated_act", dict(rows=4), F32), bench, EAGER)
    assert "missing 1 required" in found.note and not found.contenders
    run = Run("patterns", dict(noise={}), [found])
    assert table.honest(run.rows) == 1 and "FAILED gated_act f32 rows=4: " in table.summary(run)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--only", "nothing"], "no pattern nothing; there is"),
        (["--only", "add_mul", "--dtype", "f8"], "no dtype f8; there is f32"),
        (["--only", "add_mul", "--sizes", "huge"], "'huge' is neither"),
        (
            ["--only", "add_mul", "--sizes", "rows=3"],
            "add_mul has no size rows and needs size too (all of size)",
        ),
        (
            ["--only", "attention", "--sizes", "hand=1"],
            "attention needs b, h, n, d too (all of b, h, n, d; may be",
        ),
        (["--only", "softmax", "--sizes", "rows=0,n=8"], "rows=0,n=8: sizes are 1 or more"),
        (["--rows", "softmax", "layer_norm bf16 rows=46"], "no row 'layer_norm bf16 rows=46'"),
        (["--sizes", "size=3"], "cases need --only"),
        (["--contenders", "jax"], "no contender jax; there is eager"),
        (["--only", "quantize_int8", "--train"], "no work is left"),
        (["--rounds", "0"], "--rounds: 0 is not 1 or more"),
        (["--minutes", "-1"], "--minutes: -1 is not more than 0"),
        (["--out", "/proc/run.json"], "--out: /proc/run.json cannot be written"),
        (["--out", "."], "--out: . is a folder"),
    ],
)
def test_a_request_without_sense_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        patterns.main(argv)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def asked(*argv, on_gpu=True) -> list[Work]:
    return selected(patterns.arguments([str(a) for a in argv])[0], on_gpu)


def test_selection():
    assert asked() == WORK and asked(on_gpu=False) == SMALL
    small, large = asked("--sizes", "small"), asked("--sizes", "large")
    assert len(small) + len(large) == len(WORK) and all(w.bytes <= 48e6 for w in small)
    assert all(w.train for w in asked("--train")) and not any(w.train for w in asked("--infer"))
    assert asked("--train", "--infer") == WORK
    both = asked(
        "--only",
        "layer_norm",
        "--sizes",
        "rows=3,n=1_000",
        "--dtype",
        "f32,f16",
        "--train",
        "--infer",
    )
    assert [(w.case, str(w.dtype), w.train) for w in both] == [
        (dict(rows=3, n=1000), f"torch.{dtype}", train)
        for dtype in ("float32", "float16")
        for train in (False, True)
    ]
    assert [w.pattern for w in asked("--only", "gated_act")] == ["gated_act"]  # no row of its own
    assert len(asked("--only", "add_mul", "--sizes", "size=3", "size=3")) == 1


def test_rows_by_name():
    name = "layer_norm bf16 rows=16384 n=4096"  # the beginning of others' names
    assert [w.name for w in asked("--rows", name)] == [name]
    found = asked("--rows", f"{name}  train", "hand=1")
    assert len(found) == 9 and found == [
        w for w in WORK if w.name == f"{name} train" or "hand=1" in w.name
    ]
    tiny = asked("--rows", "bf16 rows=64", "--only", "softmax", on_gpu=False)
    assert [w.name for w in tiny] == ["softmax bf16 rows=64 n=256 train"]


def test_a_short_run_sees_every_pattern_first():
    order = [work.pattern for work in spread(WORK)]
    kinds = len(set(order))
    assert len(set(order[:kinds])) == kinds and sorted(order) == sorted(w.pattern for w in WORK)


def test_candidates_are_timed_by_one_process_at_a_time(tmp_path, monkeypatch):
    lock = tmp_path / "lock"

    def times_a_candidate():
        with lock.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 1.5

    monkeypatch.setenv(compiling.LOCK, str(lock))
    monkeypatch.setattr(compiling, "benchmarker", SimpleNamespace(benchmark_gpu=times_a_candidate))
    compiling.one_at_a_time()
    assert compiling.benchmarker.benchmark_gpu() == 1.5
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


@pytest.mark.full
def test_work_compiled_ahead_is_found_in_the_cache(bench):
    work = Work("add_mul", dict(size=2000 + os.getpid()), F32)  # in no cache yet
    assert compiling.compile_ahead([(work, ["inductor"]), (work, ["nothing"])], jobs=3) == [
        "done",
        "failed",
    ]
    hits = torch._dynamo.utils.counters["aot_autograd"]
    before = hits["autograd_cache_hit"]
    measure(work, bench, EAGER)
    assert hits["autograd_cache_hit"] == before + 1


def test_a_run_in_parts(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run.json")]
    for names in (["add_mul", "quantize_int8"], ["add_mul", "add_mul_exp"]):
        assert run_patterns("--only", *names, "--sizes", "size=1000", "--add", *out) == 0
    run = Run.load(tmp_path / "run.json")
    assert [r.pattern for r in run.rows] == ["quantize_int8", "add_mul", "add_mul_exp"]
    assert run.about["noise"]["rows"] and "3 rows in" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_patterns("--only", "add_mul", "--add")


def test_quoted_rows_come_first_and_others_are_counted():
    args, _ = patterns.arguments(["--quoted", *map(str, PAGES), "--minutes", "10"])
    plan, quoted = (
        planning.planned(args, on_gpu=True),
        quoted_names(PAGES, "rows"),
    )
    assert {work.name for work, _ in plan[: len(quoted)]} == set(quoted) and len(plan) == len(WORK)
    assert all((len(makers) == 5) == (i < len(quoted)) for i, (_, makers) in enumerate(plan))


def test_flex_attention_is_asked_for_what_it_has_code_for():
    names = "inductor", "flex"
    args, _ = patterns.arguments(["--rows", "documents=8", "window=1024", "--contenders", *names])
    found = {"documents" in work.case: tuple(m) for work, m in planning.planned(args, on_gpu=True)}
    assert {*found[True]} == {*names} and found[False] == ("inductor",)
    assert "flex" not in planning.named(None)


def test_max_autotune_that_is_not_compiled_in_time_is_left_out(monkeypatch):
    def compile_ahead(tasks, jobs, seconds):
        order.extend(name for _, names in tasks for name in names)
        assert (seconds is None) == (minutes is None)
        return ["done"] * (len(tasks) - 1) + [""]

    monkeypatch.setattr(planning, "compile_ahead", compile_ahead)
    for minutes, slow in ((1.0, 1), (None, 2)):
        order: list[str] = []
        plan = [(work, planning.named(["inductor", "max-autotune"])) for work in SMALL[:2]]
        found = planning.ahead(plan, 2, minutes)
        assert sorted(order) == ["inductor"] * 2 + ["max-autotune"] * 2
        assert sum("max-autotune" in makers for _, makers in plan) == slow and found["late"] == 1
        if minutes:
            assert order[:2] == ["inductor"] * 2


def test_gradients_are_in_memory_as_autograd_has_them():
    """AOTAutograd copies a gradient in any other order, outside of what is timed."""
    x = torch.randn(2, 5, 3, 8)
    images = x.to(memory_format=torch.channels_last)
    of_heads, of_images, of_rows = gradients_for([x.transpose(1, 2), images, x[0, 0].t()])
    assert of_heads.shape == (2, 3, 5, 8) and of_heads.is_contiguous()
    assert of_images.stride() == images.stride() != of_images.contiguous().stride()
    assert of_rows.shape == (8, 3) and of_rows.is_contiguous()
