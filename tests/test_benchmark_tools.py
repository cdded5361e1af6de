"""The tools around the benchmark: progress, configurations of kernels, and two revisions side by
side.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import block_size, compare, interpreted, sweep
from benchmarks.command_line import progress
from benchmarks.configurations import blocks, running
from benchmarks.configurations.sweeps import SWEEPS
from benchmarks.measure.library import first_found
from benchmarks.measure.timing import Clock
from benchmarks.pages.quoted import ROOT
from benchmarks.pattern_runs import comparison, sides
from benchmarks.pattern_runs.contenders import results_of
from benchmarks.records import runs
from benchmarks.records.provenance import history, missing
from benchmarks.records.runs import Run
from benchmarks.workloads.work import F32, Work
from fusion_backend.ops.registry import FUSION_RULES

# on CPU, kernels run in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADD_MUL = Work("add_mul", dict(size=1000), F32)
REAL = torch.empty_like

# Progress


@pytest.mark.parametrize("rich", [True, False])
def test_progress_on_a_terminal(rich, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    with progress.progress(2, "patterns") as begin:
        begin("first")
        begin("second")
    told = capsys.readouterr()
    assert not told.out and ("patterns 2/2: second" in told.err) == (not rich)


def test_no_progress_in_a_pipe(capsys):
    with progress.progress(1, "patterns") as begin:
        begin("first")
    assert not capsys.readouterr().err


# Block sizes


def test_block_sizes(tmp_path, capsys):
    argv = "--pattern add_mul --size 3000 --block 64 1024 --warps 2 4 --rounds 1 --out".split()
    assert block_size.main([*argv, str(tmp_path / "run.json")]) == 0
    run = Run.load(tmp_path / "run.json")
    kernels = {(r.block, r.warps): r for r in run.rows if r.who == "kernel"}
    # 64 elements, 4 warps: idle threads
    assert set(kernels) == {(64, 2), (1024, 2), (1024, 4), (2048, 2), (2048, 4)}
    assert [key for key, r in kernels.items() if r.chosen] == [(2048, 4)]
    assert all(
        r.rate_bytes == pytest.approx(48000 / r.kernel.median * 1e3, rel=1e-4) for r in run.rows
    )
    assert {r.who for r in run.rows} == {
        "kernel",
        "eager",
        "inductor",
    } and "GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["add_mul", "quantize_int8", "softmax", "layer_norm", "add_rms_norm"]
)
def test_every_block_computes_the_same(name, monkeypatch):
    """A grid that does not fit the BLOCK would leave elements out."""
    size = dict(size=1500) if name in ("add_mul", "quantize_int8") else dict(rows=3, n=300)
    work = Work(name, size, F32)
    args, outs = work.arguments(DEVICE), []
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: outs.append(REAL(*a, **k)) or outs[-1])
    call, chosen = blocks.blocked(work, args)
    results = []
    for config in ((128, 2), (512, 4), chosen):
        for out in outs:
            out.zero_()
        result = call(*config)
        result = outs[-1] if result is None else result[0] if isinstance(result, tuple) else result
        results.append(result.clone())
    exact = results_of(FUSION_RULES[name].reference, args)[0]
    for result in results:
        torch.testing.assert_close(result, exact)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--pattern", "nothing"], "no pattern nothing"),
        (["--pattern", "gated_linear"], "python -m benchmarks.sweep gated_linear"),
        (["--pattern", "rotary"], "rotary has no kernel"),
        (
            ["--pattern", "add_mul", "--size", "rows=3"],
            "add_mul has no size rows and needs size too",
        ),
        (["--pattern", "add_mul", "--block", "100"], "100 is no power of two"),
    ],
)
def test_block_size_refuses(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        block_size.main(argv)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_configuration_that_fails_is_named(capsys):
    def fails():
        raise RuntimeError("out of resource: shared memory")

    found = running.timed(
        iter([("w", "bad", fails), ("w", "good", lambda: None)]), Clock(DEVICE), 1
    )
    assert [words for _, words in found["w"]] == [
        "good"
    ] and "w: bad fails: RuntimeError" in capsys.readouterr().out


@pytest.mark.parametrize("configs", dict.fromkeys(SWEEPS.values()), ids=lambda fn: fn.__name__)
def test_every_sweep_has_a_configuration_that_runs(configs):
    found = running.timed([next(configs(DEVICE))], lambda call: 1.0, 1)
    assert len(found) == 1


def test_sweep_refuses(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["nothing"])
    assert "no sweep for nothing" in capsys.readouterr().err


# Two revisions


class Stub:
    """A side whose calls take what the test says."""

    def __init__(self, ms: float, **prepared):
        self.ms, self.prepared = ms, dict(ms=ms) | prepared

    def send(self, **request):
        self.request = request

    def answer(self):
        if self.request["do"] == "prepare":
            if "error" in self.prepared:
                raise sides.Failed(self.prepared["error"])
            return self.prepared
        return dict(ms=[self.ms * (1 + 0.01 * (i % 3)) for i in range(self.request["calls"])])


@pytest.mark.parametrize(
    "base, new, verdict, code",
    [
        (Stub(1.0), Stub(1.0), "same", 0),
        (Stub(1.0), Stub(1.01), "same", 0),
        (Stub(1.0), Stub(1.05), "slower", 1),
        (Stub(0.01), Stub(0.0103), "same", 0),
        (Stub(0.01), Stub(0.0105), "slower", 1),
        (Stub(1.0), Stub(1.03), "slower", 1),
        (Stub(1.0), Stub(0.9), "faster", 0),
        (Stub(1.0, missing=True), Stub(1.0), "new", 0),
        (Stub(1.0, error="it broke"), Stub(1.0), "base failed", 0),
        (Stub(1.0), Stub(1.0, error="it broke"), "failed", 1),
    ],
)
def test_a_regression_is_found(base, new, verdict, code, capsys):
    found = comparison.compare(ADD_MUL, base, new, rounds=4, tolerance=0.02)
    assert found.verdict == verdict and verdict.split()[-1] in comparison.show(found).lower()
    assert comparison.finish(Run("compare", {}, [found])) == code


def test_bounds_widen_with_the_scatter():
    assert comparison.bounds([1.1] * 5) == (1.1, 1.1)
    low, high = comparison.bounds([0.8, 0.9, 1.0, 1.1, 1.2, 1.3])
    assert low < 0.9 and high > 1.2


@pytest.mark.full
def test_this_tree_against_its_commit(tmp_path, capsys):
    root = Path(sides.ROOT)
    if subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("no git checkout")
    out = tmp_path / "run.json"
    argv = [
        "--base",
        "HEAD",
        "--only",
        "add_mul",
        "--sizes",
        "size=1000",
        "--rounds",
        "2",
        "--tolerance",
        "99",
    ]
    assert compare.main([*argv, "--out", str(out)]) == 0, capsys.readouterr()
    (found,) = Run.load(out).rows
    assert (
        found.verdict == "same"
        and found.base.n == found.new.n
        and found.low <= found.ratio <= found.high
    )
    trees = subprocess.run(
        ["git", "-C", root, "worktree", "list"], capture_output=True, text=True
    ).stdout
    assert "base-tree" not in trees


@pytest.mark.full
def test_a_base_in_an_older_layout(tmp_path):
    """A revision from before fusion_backend was divided into packages."""
    revision = "8cccfab3153c"
    if missing(revision) or history() is None:
        pytest.skip("the repository's history is not at hand: no git, or a shallow clone")
    with sides.checkout(revision, tmp_path) as tree:
        base = sides.Process(tree, tmp_path / "base", "fusion-always")
        try:
            base.greet()
            base.send(do="prepare", work=ADD_MUL.to_json())
            assert base.answer()["ms"] > 0
        finally:
            base.close()


def test_a_name_is_found_in_the_first_place_that_has_it(tmp_path, monkeypatch):
    (tmp_path / "oldlayout.py").write_text("FUSION_RULES, patterns = 1, 2")
    (tmp_path / "needsmore.py").write_text("import nothere")
    monkeypatch.syspath_prepend(tmp_path)
    assert first_found("newlayout.pattern:FUSION_RULES", "oldlayout:FUSION_RULES") == 1
    assert first_found("oldlayout:usable", "oldlayout:patterns") == 2
    with pytest.raises(ImportError, match="has none of newlayout:x, oldlayout:x"):
        first_found("newlayout:x", "oldlayout:x")
    with pytest.raises(ModuleNotFoundError, match="nothere"):
        first_found("needsmore:FUSION_RULES", "oldlayout:FUSION_RULES")


def test_without_git(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert compare.main(["--base", "HEAD"]) == 2
    assert "there is no git" in capsys.readouterr().err and runs.revision() is None


def test_a_revision_that_is_none(capsys):
    assert compare.main(["--base", "no-such-revision"]) == 2
    assert "no revision no-such-revision" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["kernels", pytest.param("gated", marks=pytest.mark.full)])
def test_the_demo(part, tmp_path):
    """The parts that need no model, in a process of their own, as `make demo` runs them."""
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo", "--only", part, "--json", out],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(r["ok"] for r in json.loads(out.read_text())["results"])
    launching = re.findall(r"^  (\w+) .* kernel launches: [1-9]", done.stdout, re.MULTILINE)
    known = [pattern.name for pattern in interpreted.with_kernels()]
    assert launching == (known if part == "kernels" else [])
