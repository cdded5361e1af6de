"""What a page quotes, and the command that measures it again."""

import re

import pytest

from benchmarks import models, reproduce
from benchmarks.pages import quoted, reproduced
from tests.test_benchmark_pages import model_run, pattern_run, spread


@pytest.fixture
def page(tmp_path):
    """A page of committed results, and a folder for new ones."""
    pattern_run().save(tmp_path / "p.json")
    model_run().save(tmp_path / "m.json")
    text = ""
    for asked in (
        f"rows {tmp_path}/p.json: softmax bf16 n=1000000;\nadd_mul bf16 n=100000000",
        f"models {tmp_path}/m.json: plain_llama train",
    ):
        text += f"<!-- figures: {asked} -->\n<!-- end of figures -->\n"
    (tmp_path / "performance.md").write_text(text)
    return tmp_path / "performance.md"


def test_what_a_page_quotes(page):
    assert quoted.quoted_names([page], "rows") == [
        "softmax bf16 n=1000000",
        "add_mul bf16 n=100000000",
    ]
    assert quoted.quoted_names([page], "models") == ["plain_llama train"]
    page.write_text(f"<!-- figures: models {page.parent}/m.json -->\n<!-- end of figures -->\n")
    assert quoted.quoted_names([page], "models") == [
        "plain_llama train",
        "mine:build train",
        "bert train",
    ]
    with pytest.raises(ValueError, match="no figures of kind swept"):
        quoted.quoted_names([page], "swept")
    with pytest.raises(ValueError, match="no figures"):
        quoted.quoted_names([page.with_name("other.md")], "rows")


@pytest.mark.parametrize("kind", ["rows", "models"])
def test_the_figures_of_the_pages_are_found(kind, tmp_path):
    """Those that `make gpu` measures again, each with the ratio that it had."""
    lines = reproduced.ratio_lines(reproduce.PAGES, kind, tmp_path / "none.json")
    assert len(lines) > 20 and all(re.search(r" \d+\.\d\d +-$", line) for line in lines)


def test_the_pages_are_measured_again(page, tmp_path, monkeypatch, capsys):
    told = []

    def run(argv):
        told.append(argv)
        if argv[0] == "benchmarks.models":
            found = model_run()
            found.rows[0].of("fusion").step = spread(10.0)
            found.save(tmp_path / "out" / "models.json")
        return 1 if argv[0] == "benchmarks.patterns" else 0

    monkeypatch.setattr(reproduce, "run", run)
    assert reproduce.main(["--out", str(tmp_path / "out"), "--minutes", "10"], [page]) == 1
    first, second, last = told
    assert first[:3] == ["benchmarks.patterns", "--quoted", str(page)] and "--once" in second
    minutes = [float(argv[argv.index("--minutes") + 1]) for argv in (first, second)]
    # the first took no time
    assert minutes == [pytest.approx(2.5, abs=0.1), pytest.approx(10, abs=0.1)]
    assert last[0] == "benchmarks.page" and len(last) == 2  # there are results of models alone
    shown = capsys.readouterr().out
    assert re.search(r"softmax bf16 n=1000000 +1\.45 +-\n", shown)
    assert re.search(r"plain_llama train +1\.25 +2\.00\n", shown)


def test_after_ctrl_c_what_there_is_is_shown(page, tmp_path, monkeypatch, capsys):
    def run(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run", run)
    assert reproduce.main(["--out", str(tmp_path / "out"), "--part", "models"], [page]) == 130
    assert "plain_llama train" in capsys.readouterr().out


def test_the_models_that_a_page_quotes(page):
    jobs = models.arguments(["--quoted", str(page), "--model", "plain_vit"]).jobs
    assert jobs == [("model", "plain_llama", "train"), ("model", "plain_vit", "infer")]
