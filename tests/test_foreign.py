"""The command benchmarks.foreign: what is wrong, what is slow, and its files."""

import os

import pytest
import torch

from benchmarks import foreign
from benchmarks.foreign_code.listed import graphs
from benchmarks.foreign_runs import measuring, request, running
from benchmarks.foreign_runs.checking import Distance, distance, worse
from benchmarks.foreign_runs.measuring import How, measure
from benchmarks.foreign_runs.rows import NO_BASELINE, GraphRow, Side
from benchmarks.foreign_runs.steps import AUTOTUNED, FUSION, INDUCTOR, TWINS, contenders
from benchmarks.foreign_runs.summary import geometric_mean, line, markdown, status, summary, text
from benchmarks.processes.pool import CRASHED, TIMEOUT, Lost
from benchmarks.processes.turns import Turns
from benchmarks.records.rows import FAILED, OK, WRONG, Spread
from benchmarks.records.runs import Run

CPU = torch.device("cpu")
F32 = torch.float32


def row(name, ratio=None, sites=0, verdict="", state=OK, note="") -> GraphRow:
    """A made-up row: Inductor takes 1 ms."""
    found = GraphRow(name, name, "family", "public | code", "infer", "f32", state, note, verdict)
    if ratio is not None:
        found.ratio, found.call_ratio, found.noise = ratio, ratio, 0.001
        times = {INDUCTOR: 1.0, FUSION: 1 / ratio, TWINS[INDUCTOR]: 1.0}
        found.sides = [Side(s, kernel=Spread.of([t]), compile_s=2.0) for s, t in times.items()]
    found.accepted = [dict(pattern="softmax", reason="", count=sites)] if sites else []
    return found


# The summary.


def test_the_summary_counts_what_was_timed():
    rows = [
        row("a", 2.0, sites=2, verdict="faster"),
        row("b", 0.5, sites=1, verdict="slower"),
        row("c", 0.975),
        row("d", 0.985, verdict="slower"),
        row("e", state=FAILED, note="raised"),
        row("f", state=NO_BASELINE, note="inductor raised"),
        row("g", 4.0, sites=1, state=WRONG, note="off"),
    ]
    found = summary(rows)
    assert (found["graphs"], found["timed"], found["with_sites"]) == (7, 5, 3)
    assert found["mean_with_sites"] == pytest.approx(4.0 ** (1 / 3))
    assert found["mean"] == pytest.approx((2 * 0.5 * 0.975 * 0.985 * 4) ** 0.2)
    assert (found["min"], found["min_name"]) == (0.5, "b")
    assert found["below_98"] == ["b", "c"] and found["below_99"] == ["b", "c", "d"]
    assert found["too_slow"] == ["b"]
    assert (found["faster"], found["slower"]) == (1, 2)
    assert found["errors"] == {"e": "failed: raised", "g": "wrong: off"}
    assert found["no_baseline"] == {"f": "inductor raised"}
    assert found["compile_s"] == {INDUCTOR: 10.0, FUSION: 10.0}
    assert "below 0.98: 2 (b, c)" in text(found) and "error: e: failed: raised" in text(found)


@pytest.mark.parametrize("rows", [[], [row("a", state=TIMEOUT)]])
def test_a_summary_of_nothing(rows):
    found = summary(rows)
    assert (found["mean"], found["min"], found["min_name"]) == (None, None, None)
    assert "geometric mean: none of graphs" in text(found)


def test_a_geometric_mean_does_not_overflow():
    assert geometric_mean([1e300] * 9) == pytest.approx(1e300)
    assert geometric_mean([]) is None


@pytest.mark.parametrize(
    "one, code",
    [
        (row("a", 1.0), 0),
        (row("a", 0.9), 0),  # within the noise
        (row("a", 0.985, verdict="slower"), 0),
        (row("a", 0.979, verdict="slower"), 1),
        (row("a", 0.98, verdict="slower"), 0),
        (row("a", 1.5, state=WRONG), 1),
        (row("a", state=TIMEOUT), 1),
        (row("a", state=CRASHED), 1),
        (row("a", state=FAILED), 1),
        (row("a", state=NO_BASELINE), 0),
    ],
)
def test_the_exit_status(one, code):
    assert status([row("b", 1.0), one]) == code


def test_a_graph_without_sites_says_so():
    assert "0 sites accepted" in line(row("a", 1.0))
    assert "2 softmax" in line(row("a", 1.0, sites=2))
    assert line(row("a", state=TIMEOUT, note="after 3 s")).endswith("TIMEOUT: after 3 s")


def test_the_page_has_every_row_the_slowest_first():
    page = markdown([row("a", 1.2), row("b", 0.9), row("c", state=FAILED, note="raised")])
    table = page[page.index("| graph") :].splitlines()
    assert [one.split(" | ")[0] for one in table[2:]] == ["| c", "| b", "| a"]
    assert all("public \\| code" in one for one in table[2:])


# What is wrong.


def test_distances():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = distance(torch.tensor([3.0, 4.5]), exact, F32)
    assert (found.off, found.size, found.relative) == (0.5, 5.0, 0.1)
    assert distance(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.int64).off == 0.5
    assert distance(None, None, None) == Distance(0.0, 0.0)
    nothing = torch.zeros(0)
    assert distance(nothing, nothing.double(), F32).relative == 0.0
    infinite = torch.tensor([3.0, float("inf")])
    assert not distance(infinite, infinite.double(), F32).unlike


@pytest.mark.parametrize(
    "got, said",
    [
        (None, "missing"),
        (torch.ones(3), r"\(3,\)"),
        (torch.ones(2, dtype=torch.float16), "float16"),
        (torch.tensor([1.0, float("nan")]), "not finite"),
    ],
)
def test_results_of_another_kind_are_worse(got, said):
    exact = torch.ones(2, dtype=torch.float64)
    bad, good = distance(got, exact, F32), distance(torch.ones(2), exact, F32)
    with pytest.raises(AssertionError, match=said):
        assert not worse([bad], [good], F32, 1)
    assert not worse([bad], [bad], F32, 1)


@pytest.mark.parametrize(
    "mine, other, size, wrong",
    [
        (1e-3, 1e-3, 1.0, False),
        (1.9e-3, 1e-3, 1.0, False),
        (3e-3, 1e-3, 1.0, True),
        (1e-6, 0.0, 1.0, False),  # a few eps
        (3e-6, 0.0, 1.0, True),
        (float("nan"), 1.0, 1.0, True),
        (1e-9, 0.0, 1e-12, False),  # zero but for rounding, next to a result of 100
    ],
)
def test_ours_may_not_be_worse_than_inductors(mine, other, size, wrong):
    large = Distance(0.0, 100.0)
    assert bool(worse([Distance(mine, size), large], [Distance(other, size), large], F32, 2)) is (
        wrong and size == 1.0
    )
    assert bool(worse([large, Distance(mine, size)], [large, Distance(other, size)], F32, 1)) is (
        wrong or size < 1.0
    )


# One graph, under contenders that do not compile.


def fill(name, tmp_path, monkeypatch, ours=lambda fn: fn, plain=lambda fn: fn, **more) -> GraphRow:
    graph = graphs()[name]
    found, made = GraphRow.of_graph(graph), {INDUCTOR: plain, FUSION: ours, **more}
    monkeypatch.setattr(measuring, "contenders", lambda *how: made)
    (tmp_path / "caches").mkdir(exist_ok=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    measure(graph, How("tiny", {}, 1, False), found, Turns(tmp_path / "gpu.lock"), CPU)
    return found


def off(fn):
    return lambda *args: fn(*args) * 1.05


def raises(fn):
    raise ZeroDivisionError("of a contender")


@pytest.mark.parametrize("name", ["layer_norm_odd infer bf16", "cross_layers train bf16"])
def test_a_graph_is_compared_and_timed(name, tmp_path, monkeypatch):
    found = fill(name, tmp_path, monkeypatch)
    assert (found.status, found.exact, found.note) == (OK, "float64", "")
    assert [side.name for side in found.sides] == [INDUCTOR, FUSION, *TWINS.values()]
    mine, base = found.side(FUSION), found.side(INDUCTOR)
    for name, ratio in (("kernel", found.ratio), ("call", found.call_ratio)):
        medians = [getattr(side, name).median for side in found.sides]
        assert ratio == pytest.approx(min(medians[::2]) / min(medians[1::2]))
    assert 0 < mine.output_error == base.output_error < 0.01
    assert (mine.gradient_error is None) == (found.mode == "infer")


def test_max_autotune_is_one_contender_more(tmp_path, monkeypatch):
    found = fill("layer_norm_odd infer bf16", tmp_path, monkeypatch, **{AUTOTUNED: lambda fn: fn})
    assert [side.name for side in found.sides][2:] == [AUTOTUNED, *TWINS.values()]
    ratio = found.side(AUTOTUNED).kernel.median / found.best(FUSION).median
    assert found.status == OK and f"{ratio:.3f} times as fast as max-autotune" in found.note


def test_a_failure_of_max_autotune_costs_the_graph_nothing(tmp_path, monkeypatch):
    found = fill("layer_norm_odd infer bf16", tmp_path, monkeypatch, **{AUTOTUNED: raises})
    assert found.status == OK and found.ratio and "max-autotune" not in found.note
    assert "of a contender" in found.side(AUTOTUNED).note


def test_contenders():
    assert [*contenders({}, True)] == [*contenders({}), AUTOTUNED] == [INDUCTOR, FUSION, AUTOTUNED]


def test_the_better_of_twins_counts():
    """Where fusion has none, as in older files, that of Inductor does not count either."""
    found = row("a", 0.5)
    found.side(TWINS[INDUCTOR]).kernel = Spread.of([0.9])
    assert (found.best(INDUCTOR).median, found.best(FUSION).median) == (1.0, 2.0)
    found.sides.append(Side(TWINS[FUSION], kernel=Spread.of([0.8])))
    assert (found.best(INDUCTOR).median, found.best(FUSION).median) == (0.9, 0.8)
    assert "0.8000" in line(found)


def test_a_twin_is_tuned_once_more(tmp_path, monkeypatch):
    """It finds what its contender compiled, without the configurations that it chose."""
    (tmp_path / "caches").mkdir()
    for ending in ("py", "best_config"):
        (tmp_path / "caches" / f"kernel.{ending}").touch()
    seen: list[list[str]] = []

    def looks(fn):
        def call(*args):
            seen.append(sorted(os.listdir(os.environ["TORCHINDUCTOR_CACHE_DIR"])))
            return fn(*args)

        return call

    fill("swish infer bf16", tmp_path, monkeypatch, plain=looks, ours=looks)
    chosen, compiled = ["kernel.best_config"], ["kernel.py"]
    # the first two calls start the compilers
    assert seen[2:10] == [chosen + compiled] * 4 + [compiled] * 4


@pytest.mark.parametrize("name", ["layer_norm_odd infer f32", "mse_loss train bf16"])
def test_a_wrong_result_is_said_and_timed(name, tmp_path, monkeypatch):
    found = fill(name, tmp_path, monkeypatch, ours=off)
    assert found.status == found.side(FUSION).status == WRONG
    assert "off, Inductor's" in found.note and found.ratio is not None


def test_a_wrong_gradient_is_said(tmp_path, monkeypatch):
    def more(fn):
        return lambda x: fn(x) + 0.1 * (x - x.detach())

    found = fill("swish train bf16", tmp_path, monkeypatch, ours=more)
    assert (found.status, found.note[:10]) == (WRONG, "gradient 0")


def test_a_contender_that_raises(tmp_path, monkeypatch):
    found = fill("swish infer bf16", tmp_path, monkeypatch, ours=raises)
    assert (found.status, found.ratio) == (FAILED, None)
    assert found.note == "fusion: ZeroDivisionError: of a contender"
    found = fill("swish infer bf16", tmp_path, monkeypatch, plain=raises)
    assert (found.status, found.ratio) == (NO_BASELINE, None)


def test_random_graphs_have_no_errors(tmp_path, monkeypatch):
    found = fill("wide_and_deep train bf16", tmp_path, monkeypatch)
    assert (found.status, found.side(FUSION).output_error) == (OK, None)
    assert "random" in found.note and found.ratio is not None


# The command.


@pytest.fixture
def lost_and_found(monkeypatch, tmp_path):
    """The command without processes, and how many rows its file has after each outcome, of which
    the third is an interruption.
    """
    path, written = tmp_path / "run.json", []

    def come(jobs, work, processes, limit, deadline, context):
        results = iter([row("", 1.1, sites=1), Lost(TIMEOUT, "after 9 s, while timing")])
        for job in jobs:
            if (result := next(results, None)) is None:
                raise KeyboardInterrupt
            if isinstance(result, GraphRow):
                result.name = job.name
            yield job, result
            written.append(len(Run.load(path).rows))

    monkeypatch.setattr(running.Runner, "fill", lambda self, root, caches: None)
    monkeypatch.setattr(running, "outcomes", come)
    return path, written


def test_an_interrupted_run_leaves_its_rows(lost_and_found, capsys):
    path, written = lost_and_found
    assert foreign.main(["--only", "convnets", "--out", str(path)]) == 130
    assert written == [1, 2]
    run = Run.load(path)
    assert [one["status"] for one in run.rows] == [OK, TIMEOUT]
    assert (run.about["stopped"], run.about["summary"]["timed"]) == ("by Ctrl-C", 1)
    about, rows = running.load(path)
    assert rows[0].side(FUSION).kernel.median == pytest.approx(1 / 1.1, rel=1e-5)
    assert "TIMEOUT: after 9 s, while timing" in capsys.readouterr().out


def test_a_run_in_parts(lost_and_found, capsys):
    path, _ = lost_and_found
    command = ["--only", "convnets", "--out", str(path)]
    foreign.main(command)
    assert foreign.main([*command, "--add"]) == 130
    names = [one["name"] for one in Run.load(path).rows]
    assert len(set(names)) == len(names) == 4
    page = path.with_suffix(".md")
    assert foreign.main(["--read", str(path), "--markdown", str(page)]) == 1
    assert "4 graphs, 2 timed" in capsys.readouterr().out and page.read_text().count("\n| ") == 6
    whole = Run.load(path)
    halves = [path.with_name(f"{i}.json") for i in range(2)]
    for i, half in enumerate(halves):
        about = whole.about | dict(command=f"command {i}", revision="abc1234")
        Run("foreign", about, whole.rows[i::2]).save(half)
    assert foreign.main(["--read", *map(str, halves), "--out", str(path)]) == 1
    again = Run.load(path)
    assert {one["name"] for one in again.rows} == set(names)
    assert again.about["command"] == "command 0; command 1"
    assert again.about["revision"] == "abc1234" and again.about["summary"]["graphs"] == 4
    with pytest.raises(SystemExit):
        foreign.main([*command, "--add", "--option", "fusion.limit=1"])
    assert "another options" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, said",
    [
        (["--option", "fusion.nonesuch=1"], "unknown option fusion.nonesuch"),
        (["--option", "limit=1"], "is not fusion.name=value"),
        (["--gate", "sometimes"], "fusion.gate is 'sometimes'"),
        (["--only", "no_such_graph"], "there is no such graph"),
        (["--only", "("], "--only"),
        (["--shard", "3/2"], "3/2 is not 1/2"),
        (["--add"], "give --out"),
        (["--warm", "--apart"], "--apart"),
        (["--read", "/nonexistent.json"], "nonexistent"),
    ],
)
def test_what_makes_no_sense_is_refused(command, said, lost_and_found, capsys):
    with pytest.raises(SystemExit) as stop:
        foreign.main(command)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_options_are_literals_or_words():
    assert request.option("fusion.limit=1") == ("fusion.limit", 1)
    assert request.option("fusion.skip=softmax") == ("fusion.skip", "softmax")
    assert request.option("fusion.dump=a=b") == ("fusion.dump", "a=b")


def test_shards_are_all_graphs_once():
    parts = [request.selected(None, (i, 3)) for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(graphs())


def test_the_list(capsys):
    assert foreign.main(["--list", "--only", "^swish .*bf16"]) == 0
    assert "2 graphs of 1 problems" in capsys.readouterr().out
