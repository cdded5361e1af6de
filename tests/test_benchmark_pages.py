"""The page of a run, and the image of README.md."""

import html.parser
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.html_pages import document, headline
from benchmarks.html_pages.run_tables import pattern_table
from benchmarks.pages.model_text import text
from benchmarks.records.rows import (
    FAILED,
    WRONG,
    BlockRow,
    CompareRow,
    Contender,
    Errors,
    ModelContender,
    ModelRow,
    Row,
    Spread,
)
from benchmarks.records.runs import Run

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def spread(ms) -> Spread:
    return Spread(9, ms, ms, ms / 50, ms * 0.97, ms * 1.1, ms * 0.99, ms * 1.02)


ABOUT = dict(
    gpu="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    date="2026-11-20",
    command="python -m benchmarks.x",
    copy_bytes_s=4.3e12,
    matrix_flops_s=7e14,
    gpu_memory=150e9,
    noise=dict(median=0.003, max=0.01, rows=4),
)


def pattern_run() -> Run:
    rows = []
    for pattern, intensity in (
        ("add_mul", 0.2),
        ("softmax", 1.1),
        ("gated_linear", 900.0),
        ("attention", 300.0),
    ):
        for size, train in ((10**6, False), (10**8, False), (10**8, True)):
            least = max(size / 4.3e12, size * intensity / 7e14) * 1e3
            ones = []
            for name, factor in (
                ("eager", 3),
                ("inductor", 1.6),
                ("inductor-again", 1.6),
                ("max-autotune", 1.3),
                ("fusion", 1.1),
            ):
                ms = least * factor
                ones.append(
                    Contender(
                        name,
                        kernel=spread(ms),
                        call=spread(ms * 1.2),
                        rate_bytes=size / ms * 1e3,
                        rate_flops=size * intensity / ms * 1e3,
                        peak_bytes=2 * size * factor,
                        saved_bytes=size * train,
                        errors=Errors({}, {}, 1e-3),
                        compile_s=3.0,
                    )
                )
            work = f"{pattern} bf16 n={size}" + " train" * train
            rows.append(
                Row(
                    work,
                    pattern,
                    dict(n=size),
                    "bf16",
                    train,
                    False,
                    size,
                    int(size * intensity),
                    intensity,
                    least,
                    ones,
                    noise=0.004,
                )
            )
    rows[0].contenders[4] = Contender("fusion", status=FAILED, note="out of memory <7 GB>")
    rows[1].of("fusion").declined = "Inductor's kernel is as fast"
    rows[1].contenders.append(Contender("fusion-always", kernel=spread(rows[1].floor_ms * 2)))
    del rows[2].contenders[3]  # no time to compile it
    rows[4].of("fusion").kernel = spread(rows[4].of("inductor").kernel.median * 1.5)
    return Run("patterns", dict(ABOUT), rows)


def model_run() -> Run:
    rows = []
    for name in ("plain_llama", "mine:build"):
        ones = [
            ModelContender(
                who,
                step=spread(ms),
                device_ms=ms * 0.9,
                cold_s=30.0,
                warm_s=4.0,
                peak_bytes=int(1e9 * ms),
                output_error=1e-2,
                shares={"matmul": 0.6, "ours" if who == "fusion" else "pointwise": 0.4},
                kernels=[dict(name="nvjet<a>", kind="matmul", calls=2, ms=ms / 2)],
            )
            for who, ms in (("eager", 40.0), ("inductor", 20.0), ("fusion", 16.0))
        ]
        ones[2].verdict = "faster"
        ones[2].fused, ones[2].declined = (
            {"softmax": 8},
            [dict(pattern="rotary", reason="no kernel yet", count=3)],
        )
        rows.append(
            ModelRow(
                name, "train", "bf16", dict(layers=8, batch=4), "float32", ones, 0.002, "inductor"
            )
        )
    rows[1].contenders[1] = ModelContender("inductor", FAILED, "out of memory")
    rows.append(
        ModelRow("bert", "train", "", {}, None, [], notes=["not measured: needs transformers"])
    )
    return Run("models", dict(ABOUT), rows)


def block_run() -> Run:
    rows = [
        BlockRow(
            "add_mul f32",
            "kernel",
            block,
            warps,
            spread(1),
            1e9 * block * warps,
            chosen=block == warps * 128,
        )
        for block in (128, 256, 1024)
        for warps in (2, 4)
    ]
    rows += [
        BlockRow("add_mul f32", who, None, None, spread(2), 3e12) for who in ("eager", "inductor")
    ]
    rows += [BlockRow("softmax", "kernel", 128, 4, None, None, FAILED, "too large")]
    return Run("block_size", dict(ABOUT), rows)


def compare_run() -> Run:
    return Run(
        "compare",
        dict(ABOUT),
        [CompareRow("add_mul", "slower", spread(1), spread(1.2), 1.2, 1.15, 1.25)],
    )


RUNS = [pattern_run, model_run, block_run, compare_run]
CHARTS = {
    "patterns": ["Speed by pattern", "Against max-autotune", "How close to the floor", "Memory"],
    "models": ["Speed of a step", "Where the time goes", "Memory"],
    "block_size": ["Bandwidth by configuration"],
    "compare": ["New revision against the base"],
}
TABLES = {
    "patterns": ["Sites", "Contenders"],
    "models": ["Models", "Contenders", "Sites and kernels"],
}
EXPONENT = re.compile(r"\b\d+(\.\d+)?e[+-]?\d{1,2}\b", re.IGNORECASE)


class Reader(html.parser.HTMLParser):
    """A page as a test sees it: tags that are closed, nothing that is fetched, the headings, which
    of them are folded, and the text.
    """

    def __init__(self, page: str):
        super().__init__()
        self.open, self.heads, self.folded, self.text, self.charts = [], [], [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href", "srcset", "data"} & {name for name, _ in attrs}, attrs
        assert tag not in ("link", "img", "object"), tag
        self.charts += dict(attrs).get("role") == "img"
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "summary"):
            self.heads.append(data)
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)
            if "details" in self.open:
                self.folded.append(data)


@pytest.mark.parametrize("make", RUNS)
def test_page(make, tmp_path):
    """The result, then charts, then tables, then where it comes from."""
    run, path = make(), tmp_path / "run.json"
    run.save(path)
    assert page.main([str(path)]) == 0
    written = (tmp_path / "run.html").read_text()
    reader = Reader(written)
    assert reader.open == [] and reader.charts
    first, *heads = reader.heads
    assert "NVIDIA H200" in first
    wanted = [*CHARTS[run.kind], *TABLES.get(run.kind, ["Table"])]
    assert [head for head in heads if head in wanted] == wanted
    assert heads[-1].startswith("Where these figures come from")
    for row in run.rows:
        name = row.title if run.kind == "models" else getattr(row, "name", None) or row.work
        assert name in written
    assert not EXPONENT.search(" ".join(reader.text))
    assert "out of memory <7" not in written  # escaped


@pytest.mark.parametrize("make", RUNS)
def test_where_it_comes_from_is_folded(make):
    run = make()
    run.about["command"] = "python -m benchmarks.x --a; python -m benchmarks.y"
    run.about["compiled_ahead"] = dict(done=36, failed=0, late=2, processes=14, seconds=22.9)
    reader = Reader(document.page(run))
    shown = " ".join(reader.text)
    for words in (
        "python -m benchmarks.x --a",
        "python -m benchmarks.y",
        "36 compiled ahead of time, none failed, 2 late; 14 processes, 22.9 s",
        "4.30 TB/s",
        "differs by 0.3% (median)",
        "3.6.0",
    ):
        assert any(words in part for part in reader.folded), words
    assert "{" not in shown and "copy_bytes" not in shown


def test_what_a_headline_says():
    found = headline.headline(pattern_run())
    assert "At 9 of 11 sites" in found.sentences[0] and "at 1 as fast" in found.sentences[0]
    assert "at 1 slower" in found.sentences[0] and "1 more site is not counted" in " ".join(
        found.sentences
    )
    number = float(re.search(r"geometric mean of the ratios is ([\d.]+)×", found.sentences[0])[1])
    assert found.title == f"Kernels: {number:.2f} times plain Inductor on one NVIDIA H200"
    ratios = [1.6 / 1.1] * 9 + [1.6 / 1.1, 1 / 1.5]  # one of them declined
    assert number == pytest.approx(statistics.geometric_mean(ratios), abs=0.006)
    found = headline.headline(model_run())
    assert "In 1 of 1 runs" in found.sentences[0] and "is 1.25×" in found.sentences[0]
    assert "Against eager it is faster in 2 of 2" in found.sentences[1]
    found = headline.headline(block_run())
    assert "the best of 6 configurations, BLOCK 1,024 with 4 warps" in found.sentences[0]


def test_a_wrong_contender_is_compared_with_nothing():
    """Its times are shown, and no ratio; the headline says whose result is wrong."""
    run = pattern_run()
    run.rows = [run.rows[3], run.rows[5]]  # softmax
    run.rows[0].of("inductor").status = WRONG
    said = " ".join(headline.headline(run).sentences)
    assert "At 1 of 1 sites" in said
    assert "1 more site is not counted, because plain Inductor's result is wrong there" in said
    first, second = re.findall(r"<tr><th scope=\"row\".*?</tr>", pattern_table(run.rows))
    assert "not compared: plain Inductor wrong" in first and "1.45×" not in first
    assert "1.45×" in second


def test_plain_inductor_behind_eager_is_named():
    run = model_run()
    run.rows[0].of("eager").step = spread(15.0)
    assert "slower than eager in plain_llama train" in " ".join(headline.headline(run).sentences)


def test_what_a_page_says():
    pattern = document.page(pattern_run())
    assert "failed: out of memory &lt;7 GB&gt;" in pattern
    assert "declined: Inductor&#x27;s kernel is as fast" in pattern
    model = document.page(model_run())
    assert (
        "not fused: 3 rotary: no kernel yet" in model
        and "nvjet&lt;a&gt;" in model
        and "needs transformers" in model
    )
    assert "Measured on a CPU" in document.page(Run("compare", dict(gpu=None)))
    stopped = document.page(Run("compare", dict(gpu="H200", stopped="time is up")))
    assert "The run stopped before its end: time is up." in stopped


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.html")), ids=lambda path: path.stem)
def test_committed_pages_are_current(path):
    made = document.page(Run.load(path.with_suffix(".json")))
    assert path.read_text(encoding="utf-8") == made, "run `make docs`"


def test_files_that_hold_no_run(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    for name in ("other.json", "broken.json", "missing.json"):
        compare_run().save(tmp_path / "good.json")
        assert page.main([str(tmp_path / name), str(tmp_path / "good.json")]) == 2
        (tmp_path / "good.html").unlink()  # written all the same
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        page.main(["a.json", "b.json", "--out", "c.html"])


def test_a_run_without_data_has_no_charts():
    row = Row("a", "a", {}, "f32", False, False, 0, 0, 0.0, 0.0, [], note="failed")
    for run in (
        Run("patterns", dict(ABOUT), [row]),
        Run("models", dict(ABOUT), [ModelRow("m", "infer", "", {}, None, [])]),
        Run("block_size", dict(ABOUT), [BlockRow("w", "kernel", 1, 1, None, None)]),
        Run("compare", dict(ABOUT), [CompareRow("w", "new")]),
    ):
        reader = Reader(document.page(run))
        assert not reader.charts and not set(reader.heads) & set(CHARTS[run.kind])
        assert "<table>" in document.page(run)


def test_model_table_as_text():
    run = model_run()
    first, second, third = (text(row) for row in run.rows)
    assert re.search(
        r"fusion +16\.000 +0\.480 +1\.25\+ +14\.400 +16\.00 +30\.0 +4\.0 +1\.0e-02 +-", first
    ), first
    assert "noise 0.2% (inductor timed twice)" in first and "fused: 8 softmax" in first
    assert "FAILED: out of memory" in second and "not measured: needs transformers" in third


def test_model_rows_survive_the_file(tmp_path):
    run = model_run()
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").rows == run.rows
