"""Pictures and pages of a run."""

import html.parser
import random
import re
import sys

import pytest
import torch

from benchmarks import page
from benchmarks.pages import html_page, pattern_plots, plots
from benchmarks.pages.model_text import text
from benchmarks.records.rows import (
    FAILED,
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

PNG = b"\x89PNG\r\n\x1a\n"
CPU = torch.device("cpu")


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
PICTURES = {
    "patterns": ["roofline", "speed-up", "memory"],
    "models": ["steps", "shares", "memory"],
    "block_size": ["block-0"],
    "compare": [],
}


class Balanced(html.parser.HTMLParser):
    """Every tag is closed, and nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.images = [], 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        for key in ("src", "href"):
            assert attrs.get(key, "data:image/png;base64,").startswith("data:image/png;base64,"), (
                attrs
            )
        self.images += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("make", RUNS)
def test_page(make, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run, path = make(), tmp_path / "run.json"
    run.save(path)
    assert page.main([str(path), "--png", str(tmp_path / "png")]) == 0
    written = (tmp_path / "run.html").read_text()
    reader = Balanced()
    reader.feed(written)
    wanted = PICTURES[run.kind]
    assert reader.open == [] and reader.images == len(wanted)
    pictures = sorted((tmp_path / "png").glob("*")) if wanted else []
    assert sorted(p.name for p in pictures) == sorted(f"run-{name}.png" for name in wanted)
    assert all(p.read_bytes().startswith(PNG) and len(p.read_bytes()) > 5000 for p in pictures)
    for row in run.rows:
        name = row.title if run.kind == "models" else getattr(row, "name", None) or row.work
        assert name in written
    assert "NVIDIA H200" in written and "4.30 TB/s" in written and "median 0.3%" in written
    assert "out of memory <7" not in written  # escaped


def test_what_a_page_says(tmp_path):
    pattern = html_page.page(pattern_run(), [])
    assert (
        "out of memory &lt;7 GB&gt;" in pattern
        and "declined: Inductor&#x27;s kernel is as fast" in pattern
    )
    model = html_page.page(model_run(), [])
    assert (
        "not fused: 3 rotary: no kernel yet" in model
        and "nvjet&lt;a&gt;" in model
        and "needs transformers" in model
    )
    assert "Measured on a CPU" in html_page.page(Run("compare", dict(gpu=None)), [])


def test_a_page_without_matplotlib(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    pattern_run().save(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page.main([str(path)]) == 1
    assert "plots need matplotlib" in capsys.readouterr().err
    written = path.with_suffix(".html").read_text()
    assert (
        "plots need matplotlib" in written and "<img" not in written and "softmax bf16" in written
    )


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


def test_a_run_without_data_has_no_pictures():
    pytest.importorskip("matplotlib")
    row = Row("a", "a", {}, "f32", False, False, 0, 0, 0.0, 0.0, [], note="failed")
    for run in (
        Run("patterns", {}, [row]),
        Run("models", {}, [ModelRow("m", "infer", "", {}, None, [])]),
        Run("block_size", {}, [BlockRow("w", "kernel", 1, 1, None, None)]),
    ):
        assert plots.plots(run) == []


def test_labels_are_spread_apart():
    rng = random.Random(0)
    for _ in range(50):
        places = sorted(rng.uniform(0, 10) ** 2 / 10 for _ in range(rng.randint(1, 20)))
        moved = pattern_plots.spread_apart(places, 0.4, 0, 10)
        assert all(b - a > 0.4 - 1e-9 for a, b in zip(moved, moved[1:], strict=False)), moved
        assert max(moved) <= 10 and min(moved) >= 0, moved
    assert pattern_plots.spread_apart([1, 5, 9], 0.4, 0, 10) == [1, 5, 9]


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
