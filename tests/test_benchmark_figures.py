"""What the README and docs quote, written from results."""

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.pages import pattern_figures, quoted
from benchmarks.pages.foreign_figures import foreign
from benchmarks.records.rows import CompareRow
from benchmarks.records.runs import Run
from tests.test_benchmark_pages import ABOUT, block_run, model_run, pattern_run, spread

ROOT = Path(__file__).parent.parent
PAGE_BYTES = 1_500_000


def compare_run() -> Run:
    rows = [
        CompareRow(
            f"w{i}", "same", spread(ms), spread(ms * ratio), ratio, ratio - 0.01, ratio + 0.01
        )
        for i, (ms, ratio) in enumerate(((0.005, 1.08), (0.03, 0.996), (0.3, 1.002), (3, 1.04)))
    ]
    return Run(
        "compare",
        dict(ABOUT),
        [*rows, CompareRow("late", "new", note="the base has no such pattern")],
    )


def sweep_run() -> Run:
    works = (("flash", "SDPA", 0.5), ("flash", "BM=128 BN=64", 0.4), ("flash", "BM=64 BN=64", 0.6))
    rows = [
        dict(work=work, config=config, ms=ms)
        for work, config, ms in (*works, ("other", "rows=1 warps=4", 0.1))
    ]
    return Run("sweep", dict(ABOUT), rows)


def test_figures_are_those_of_the_committed_results(capsys):
    assert readme.main(["--check"]) == 0, capsys.readouterr().out


def compiled_run() -> Run:
    rows = [
        dict(
            kernel=kernel,
            dtype="bf16",
            work="",
            warps=4,
            triton=triton,
            registers=n,
            spilled=0,
            shared=16,
            tensor_core="",
        )
        for kernel, triton, n in (
            ("a", "3.9.0", 40),
            ("a", "3.6.0", 32),
            ("a", "3.9.0", 41),
            ("b", "3.9.0", 8),
        )
    ]
    return Run("compile_kernels", dict(ABOUT), rows)


@pytest.fixture
def pages(tmp_path):
    """A repository with a page, and results of each kind."""
    (tmp_path / "docs").mkdir()
    runs = dict(
        p=pattern_run(),
        m=model_run(),
        b=block_run(),
        c=compare_run(),
        s=sweep_run(),
        k=compiled_run(),
    )
    for name, run in runs.items():
        run.save(tmp_path / f"{name}.json")

    def write(asked, inside=""):
        (tmp_path / "README.md").write_text(
            f"# A\n\n<!-- figures: {asked} -->\n{inside}<!-- end of figures -->\n\nB\n"
        )
        return tmp_path

    return write


def asked_for(pages, asked) -> str:
    root = pages(asked)
    assert readme.main([], root) == 0
    assert readme.main(["--check"], root) == 0
    return (root / "README.md").read_text()


def test_summary(pages):
    found = asked_for(pages, "summary p.json").replace("\n", " ")
    assert (
        "In 9 of 11 rows fusion with its default gate is faster" in found and "in 1 slower" in found
    )
    assert "Slower than plain Inductor: softmax bf16 n=100000000 (" in found
    tuned = "Of the 10 rows in which max-autotune was timed, fusion is faster than it in 9, "
    assert tuned + "as fast in 0, slower" in found
    assert (
        "wrong or failed: add_mul bf16 n=1000000: fusion failed" in found
        and "0.3% (median)" in found
    )


def test_versions_of_triton_stand_side_by_side(pages):
    found = asked_for(pages, "compiled k.json")
    assert (
        "| kernel | launches | registers, 3.6.0 | registers, 3.9.0 | bytes spilled, 3.6.0 | "
        in found
    )
    assert (
        "| a | 2 | 32 | 41 | 0 | 0 | 16 | 16 |" in found
        and "| b | 1 | – | 8 | – | 0 | – | 16 |" in found
    )


def test_by_pattern(pages):
    found = asked_for(pages, "by-pattern p.json")
    # declined: the same code
    assert "| add_mul | 1 | 1 | 0 | 1 | 1.45 | 1.45 | 1.45 | 1.18 |" in found
    assert "| softmax | 2 | 0 | 1 | 0 | 0.67 | 1.45 | 1.45 | 1.18 |" in found


def test_named_rows(pages):
    found = asked_for(
        pages, "rows p.json: softmax bf16 n=100000000 train;\nadd_mul bf16  n=1000000"
    )
    heads = "| site | eager | plain Inductor | max-autotune | fusion | ratio | to max-autotune "
    assert heads + "| of the floor |" in found
    assert (
        "| softmax bf16 n=100000000 train | 0.0698 | 0.0372 | 0.0302 | 0.0256 | 1.45 | 1.18 | 91% |"
        in found
    )
    assert "| add_mul bf16 n=1000000 | 0.0007 | 0.0004 | 0.0003 | – | – | – | – |" in found


def test_all_rows(pages):
    found = asked_for(pages, "rows p.json")
    assert len(re.findall("^\\| ", found, re.M)) == 12 + 2
    line = "| add_mul bf16 n=100000000 | 0.0698 | 0.0372 | 0.0302 | 0.0256 "
    assert line + "| 1.45 (declined) | 1.18 | 91% | 0.80 |" in found
    assert (
        "| add_mul bf16 n=100000000 train | 0.0698 | 0.0372 | – | 0.0256 | 1.45 | – | 91% | – |"
        in found
    )


def test_what_was_taken_instead():
    """Users get another pattern's kernel: the row is neither declined nor "the same"."""
    run = pattern_run()
    row = next(row for row in run.rows if row.name == "add_mul bf16 n=100000000")
    row.of("fusion").sites = [
        dict(pattern="add_mul", fused=False),
        dict(pattern="gelu", fused=True),
    ]
    assert "| 1.45 (by gelu) | 1.18 | 91% | 0.80 |" in pattern_figures.named_rows(run, [row.name])
    assert "| add_mul | 2 | 0 | 0 | 0 | 1.45 | 1.45 | 1.45 | 1.18 |" in pattern_figures.by_pattern(
        run, []
    )
    assert (
        "faster than plain Inductor"
        in pattern_figures.summary(run, []).replace("\n", " ").split("10 of 11 rows")[1]
    )


def test_no_committed_row_is_declined_and_faster():
    for row in Run.load(ROOT / "benchmarks" / "results" / "h200.json").rows:
        assert not pattern_figures.declined(row) or row.ratio("fusion") < 1.05, row.name


def test_columns_that_nobody_measured_are_left_out():
    run = pattern_run()
    for row in run.rows:
        row.contenders = [c for c in row.contenders if c.name in ("inductor", "fusion")]
    assert pattern_figures.named_rows(run, []).startswith(
        "| site | plain Inductor | fusion | ratio | of the floor |\n"
    )


def test_memory_that_differs(pages):
    found = asked_for(pages, "memory p.json")
    assert len(re.findall("^\\| ", found, re.M)) == 8 + 2, found  # those of 10^8 bytes
    assert "| softmax bf16 n=100000000 train | 320 | 220 | – | 100 | 100 | – |" in found
    assert "| softmax bf16 n=1000000 | 3 | 2 | – | 0 | 0 | – |" in asked_for(
        pages, "memory p.json: softmax bf16 n=1000000"
    )


def test_losses_are_found(pages):
    found = asked_for(pages, "losses p.json")
    assert (
        len(re.findall("^\\| ", found, re.M)) == 1 + 2
        and "| softmax bf16 n=100000000 | 0.0698 | 0.0372 |" in found
    )
    assert "None." in asked_for(pages, "losses m.json")


def test_a_slower_model_is_a_loss():
    run = model_run()
    run.rows[0].of("fusion").step = spread(25.0)
    assert (
        "plain_llama train bf16 (layers 8, batch 4) | 40.00 | 20.00 | 25.00 | 0.80 |"
        in pattern_figures.losses(run, [])
    )


def test_models_table(pages):
    found = asked_for(pages, "models m.json")
    line = "| plain_llama train bf16 (layers 8, batch 4) | 40.00 | 20.00 | 16.00 | 1.25 | 0.2% "
    line += "| 20.0 → 16.0 | 8 |"
    assert line in found and "| 40.00 | failed | 16.00 | – |" in found
    assert "| bert train | not measured: needs transformers | – |" in found
    assert asked_for(pages, "models m.json: plain_llama train").count("\n| ") == 3


def test_where_the_time_of_models_goes(pages):
    found = asked_for(pages, "shares m.json")
    assert "| model | all kernels | matmul | pointwise | ours |" in found
    assert (
        "| plain_llama train | 18.00 → 14.40 | 10.80 → 8.64 | 7.20 → 0.00 | 0.00 → 5.76 |" in found
    )


def test_two_sides_of_one_revision(pages):
    found = asked_for(pages, "compared c.json").replace("\n", " ")
    said = "Of the 3 kernels that take at least 20 µs, 2 differ by at most 3%; "
    assert said + "median 0.4%, largest 4.0%." in found
    assert (
        "Of the 4 kernels that were timed, 2 differ" in found
        and "Not compared: late (new)." in found
    )


def test_each_graph_that_is_not_ours():
    """With "each" every graph has a line, and otherwise every family."""
    run = Run.load(ROOT / "benchmarks" / "results" / "h200-foreign-networks.json")
    names = [row["name"] for row in run.rows]
    each, families = foreign(run, ["each"]), foreign(run, [])
    assert all(f"\n| {name} | " in each for name in names)
    assert "| networks | " in families and not any(f"| {name} | " in families for name in names)


def test_block_sizes(pages):
    found = asked_for(pages, "block-sizes b.json")
    assert (
        "| add_mul f32 | 3000 | 3000 | 512 (256, 2) | 4096 (1024, 4) |" in found
        and "softmax" not in found
    )


def test_sweeps(pages):
    found = asked_for(pages, "swept s.json")
    assert "| flash | SDPA 0.5000 | 0.4000 | 1.25 | BM=128 BN=64 |" in found
    assert "| other | – | 0.1000 | – | rows=1 warps=4 |" in found
    found = asked_for(pages, "ways s.json")
    assert "| ms | SDPA | BM=128 BN=64 | BM=64 BN=64 | rows=1 warps=4 |" in found
    assert "| flash | 0.5000 | 0.4000 | 0.6000 | – |" in found


def test_check_finds_a_change(pages, capsys):
    root = pages("by-pattern p.json", "by hand: 9.99\n")
    before = (root / "README.md").read_text()
    assert readme.main(["--check"], root) == 1
    assert (
        "-by hand: 9.99" in capsys.readouterr().out and (root / "README.md").read_text() == before
    )


@pytest.mark.parametrize(
    "asked, message",
    [
        ("numbers p.json", "no figures of kind 'numbers'; there are source, summary, by-pattern"),
        ("summary nothere.json", "nothere.json"),
        (
            "summary m.json",
            "summary needs a run of benchmarks.patterns; m.json is one of benchmarks.models",
        ),
        ("rows p.json: conv2d n=1", "no row conv2d n=1"),
        ("summary", "is not of the form"),
    ],
)
def test_figures_that_there_are_not(pages, asked, message, capsys):
    assert readme.main([], pages(asked)) == 2
    assert message in capsys.readouterr().err


# A measured time, rate, ratio or share. Prose may give one where its paragraph names a committed
# results file.
FIGURE = re.compile(r"\d\s?(ms|µs|TB/s|GB/s|TFLOP/s|times (as )?fast)\b|\d\s?%|\d\.\d+\s?×(?!\d)")


def unsourced(text: str) -> list[str]:
    text = re.sub(r"```.*?```", "", quoted.BLOCK.sub("", text), flags=re.DOTALL)
    return [
        part
        for part in text.split("\n\n")
        if FIGURE.search(part) and "benchmarks/results/" not in part
    ]


def test_no_measured_figure_without_a_source():
    assert unsourced((ROOT / "README.md").read_text()) == []
    # prose in docs explains limits and options; tables hold measurements
    for path in (ROOT / "docs").rglob("*.md"):
        lines = [
            line
            for part in unsourced(path.read_text())
            for line in part.splitlines()
            if line.startswith("|")
        ]
        assert not [line for line in lines if FIGURE.search(line)], path.name


@pytest.mark.parametrize(
    "figure", ["0.094 ms", "1.5×", "96%", "3 %", "6.6 µs", "4.3 TB/s", "2 times as fast"]
)
def test_a_figure_by_hand_is_found(figure):
    block = f"<!-- figures: summary x.json -->\nit takes {figure}\n<!-- end of figures -->\n"
    assert unsourced(f"A\n\nit takes {figure}\n\n{block}") == [f"it takes {figure}"]
    assert unsourced(f"it takes {figure} (benchmarks/results/h200.json), 192×5120") == []
    assert unsourced("layer_norm 192×5120 in bf16") == []


# The committed pages.


def test_committed_pages_are_small():
    pages = list((ROOT / "benchmarks" / "results").glob("*.html"))
    assert pages
    for path in pages:
        assert path.stat().st_size < PAGE_BYTES, f"{path.name} is too large"
        assert path.with_suffix(".json").exists(), f"{path.name} has no results"


def test_commands_of_committed_results_are_there():
    """`python -m benchmarks.NAME`, and the models that results name as benchmarks.MODULE:NAME."""
    seen = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        seen |= set(re.findall(r"\b(benchmarks\.\w+)(?::(\w+))?", path.read_text()))
    for module, name in sorted(seen):
        assert importlib.util.find_spec(module), module
        assert not name or callable(getattr(importlib.import_module(module), name)), name
    assert {"benchmarks.patterns", "benchmarks.in_place"} <= {module for module, _ in seen}
