"""What a user reads: one screen, with the module and line of every site, counted once."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_backend
from fusion_backend import Pattern, explain
from fusion_backend.compat.torch import graph_break
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.places import folded, short
from fusion_backend.reporting.records import NO_GPU, GraphRecord, Miss, Site
from fusion_backend.reporting.report import Report


class Block(nn.Module):
    def __init__(self, n=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@functools.cache
def blocks() -> tuple[Report, Report]:
    """Twelve blocks in inference: here, and as on a GPU."""
    model, x = nn.Sequential(*(Block() for _ in range(12))), torch.randn(4096, 64).bfloat16()
    model = model.bfloat16()
    with torch.no_grad():
        return explain(model, x), explain(model, x, target="H200")


def words(report: Report, **how) -> str:
    return " ".join(report.text(**how).split())


def test_layers_are_folded_and_named_by_module_and_line():
    here, there = blocks()
    line = Block.forward.__code__.co_firstlineno + 1
    assert "×12" in str(there) and "*.norm" in str(there) and f"test_report.py:{line}" in str(there)
    assert len(str(there).splitlines()) < 25 and len(str(here).splitlines()) < 25
    verbose = there.text(verbose=True)
    assert "0.norm" in verbose and "11.norm" in verbose and "×" not in verbose
    assert {s.module for s in there.sites if s.pattern == "layer_norm"} >= {"0.norm", "11.norm"}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_asked_for(width):
    far = "/somewhere/site-packages/" + "x" * 120 + ".py:12"
    long = Report([GraphRecord(1, sites=[Site("softmax", far, False, f"because, at {far}")])])
    for report in (*blocks(), long):
        for verbose in (False, True):
            lines = report.text(verbose, width).splitlines()
            assert max(map(len, lines)) <= width, max(lines, key=len)


@pytest.mark.parametrize("width", [1, 60, 100])
def test_long_names_and_missing_words_are_no_errors(width):
    long = Site("name" * 30, "/a/b.py:3", False, "the guard refuses it")
    nowhere = [Site("softmax", "", False, reason, cause=NO_GPU) for reason in ("", "a reason")]
    for verbose in (False, True):
        text = Report([GraphRecord(1, sites=[long])]).text(verbose, width)
        assert "guard" in text and long.pattern in text
        report = Report([GraphRecord(1, sites=nowhere, faults=[""])])
        assert "softmax" in report.text(verbose, width)


def test_the_width_is_the_terminals_up_to_100(monkeypatch):
    for columns, widest in (("72", 72), ("300", 100), ("20", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, str(blocks()[1]).splitlines())) <= widest


def test_without_a_gpu_there_is_one_hint_instead_of_reasons():
    text = str(blocks()[0])
    assert text.count("CUDA") == 1 and 'target="H200"' in text and "needs a GPU" in text
    assert "target=" not in str(blocks()[1])


def test_a_target_decides_as_its_gpu_would_and_restores_everything():
    here, there = blocks()
    assert not here.fused and {s.cause for s in here.sites if s.counted} == {NO_GPU}
    assert there.fused and all(s.cause != NO_GPU for s in there.sites)
    assert "as on an NVIDIA H200" in words(there) and "guess" not in str(there)
    again = explain(Block(), torch.randn(8, 64))
    assert NO_GPU in {s.cause for s in again.sites}, "the target is forgotten afterwards"
    a100 = explain(Block(), torch.randn(8, 64), target="a100")
    assert "timed on an H200; what it says of an NVIDIA A100 is a guess" in words(a100)
    with pytest.raises(ValueError, match="target is 'H2000'; known are H200, H100"):
        explain(Block(), torch.randn(8, 64), target="H2000")


def test_the_multiprocessors_are_the_targets():
    from fusion_backend.kernels.common.rows import multiprocessors
    from fusion_backend.kernels.common.target import as_on, gpu

    cpu = torch.device("cpu")
    with as_on(gpu("A100")):
        with as_on(None):
            assert multiprocessors(cpu) == 108
    assert multiprocessors(cpu) == 4


def test_each_norm_counts_once():
    """rms_norm is also found without its weight, and inside add_rms_norm and norm_linear."""

    def model(x, r, w, v):
        h = x + r
        return F.linear(F.rms_norm(h, (64,), w), v), h

    x, w = torch.randn(8, 64), torch.randn(64)
    report = explain(model, x, x + 1, w, torch.randn(32, 64))
    assert len(report.sites) > 1 and sum(s.counted for s in report.sites) == 1
    assert "0 of 1 recognised sites" in str(report)
    assert "norm_linear" not in str(report) and "norm_linear" in report.text(verbose=True)


def test_a_site_that_is_not_counted_hides_no_other(scratch):
    """`lower` overlaps `upper`, which is fused, and so does not count; `last` overlaps `lower`."""

    @Pattern
    def upper(x: Tensor) -> Tensor:
        return torch.tan(x).cos().sin().exp()

    @Pattern
    def lower(x: Tensor) -> Tensor:
        return x.exp().tanh().sinh()

    @Pattern
    def last(x: Tensor) -> Tensor:
        return x.sinh().cosh()

    def model(x):
        return x.tan().cos().sin().exp().tanh().sinh().cosh()

    options = {"fusion.gate": "always", "fusion.skip": "last"}
    chain = explain(model, torch.randn(4), options=options)
    assert [s.pattern for s in chain.sites if s.counted] == ["upper", "last"]
    assert "switched off by fusion.skip" in str(chain)
    # all are refused: `lower` is an alternative of `upper`, and `last` is none of `lower`
    refused = explain(model, torch.randn(4), options={"fusion.gate": "never"})
    assert [s.pattern for s in refused.sites if s.counted] == ["upper", "last"]


def test_a_report_can_be_read_while_its_graph_is_compiled():
    """Dicts that another thread may be going through are not changed."""
    record, read = GraphRecord(1), {}

    def backend(gm, example_inputs):
        read.update(copied=record.copied, rules=record.rules, operators=record.operators)
        fuse_graph(gm, Options(), record, usable(patterns()))
        return gm.forward

    torch.compile(lambda x, y: (x + y) * y, backend=backend)(*torch.randn(2, 4))
    assert record.rules and record.operators == {"add": 1, "mul": 1}
    assert read == {"copied": {}, "rules": {}, "operators": {}}


def test_code_of_torch_is_named_by_its_module():
    report = explain(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.randn(8, 64))
    assert [s.where for s in report.sites if s.pattern == "layer_norm"] == ["module 1"]
    assert "module 1" in str(report) and "node layer_norm" not in report.text(verbose=True)


class Named(nn.Module):
    def __init__(this):
        super().__init__()
        this.norm, this.act = nn.GroupNorm(4, 8), nn.SiLU()

    def forward(this, x):
        return F.silu(this.norm(x))


def test_a_site_has_the_module_of_its_operators():
    """The last one, an activation, may belong to the model itself; whatever that calls itself."""
    report = explain(nn.Sequential(Named()), torch.randn(2, 8, 6, 6))
    assert [s.module for s in report.sites if s.counted] == ["0"], report.sites
    report = explain(Named(), torch.randn(2, 8, 6, 6))
    assert [s.module for s in report.sites if s.counted] == ["norm"], report.sites


def test_near_misses_are_shown_where_nothing_else_is_found():
    report = explain(nn.LayerNorm(64), torch.randn(8, 64))
    assert any(m.pattern == "dropout_add_layer_norm" for m in report.misses)
    assert "dropout" not in str(report) and "dropout" in report.text(verbose=True)
    near = [Miss("softmax", "a.py:3", 4, 5, "expected exp, found sin at a.py:2")]
    text = words(Report([GraphRecord(1, misses=near)]))
    assert "a.py:3: softmax, 4 of 5 operators matched, then expected exp, found sin" in text
    near[0].inside = True
    assert "softmax" not in str(Report([GraphRecord(1, misses=near)]))


def breaks(x):
    y = F.layer_norm(x + 1, (64,))
    print(end="")
    if y.sum() > 0:
        y = y * 2
    return y.softmax(-1)


def test_graph_breaks_have_a_place_and_a_cause():
    report = explain(breaks, torch.randn(8, 64))
    first = breaks.__code__.co_firstlineno
    assert len(report.graphs) == 3
    assert [g.broken and g.broken[0].split(":")[-1] for g in report.graphs] == [
        str(first + 2), str(first + 3), None,
    ]  # fmt: skip
    text = words(report)
    assert f"test_report.py:{first + 2}: " in text and "`print`" in text
    assert f"test_report.py:{first + 3}: the code branches on the value of a tensor" in text
    assert graph_break(torch.fx.symbolic_trace(nn.ReLU())) is None


def test_an_encoder_layer_in_evaluation_says_why_there_is_nothing():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        text = words(explain(layer, torch.randn(2, 16, 64)))
    assert "0 of 0" in text and "torch.backends.mha.set_fastpath_enabled(False)" in text
    assert "The operators are sin ×2." in words(explain(lambda x: x.sin().sin(), torch.randn(8)))


def test_training_and_inference_are_told_apart():
    model, x = Block(), torch.randn(8, 64)
    assert "1 graph, training" in str(explain(model, x))
    with torch.no_grad():
        assert "1 graph, inference" in str(explain(model, x))


def test_what_the_gate_leaves_can_be_had():
    site = Site("add_mul", "a.py:1", False, "Inductor is as fast", cause="unprofitable")
    assert 'options={"fusion.gate": "always"}' in str(Report([GraphRecord(1, sites=[site])]))


def test_options_are_refused_as_torch_compile_refuses_them():
    for run in (
        lambda o: torch.compile(lambda x: x + 1, options=o)(torch.ones(2)),
        lambda o: explain(lambda x: x + 1, torch.ones(2), options=o),
    ):
        with pytest.raises(RuntimeError, match="Unexpected optimization option no_such_thing"):
            run({"no_such_thing": 1})


def test_a_repr_is_short_and_json_has_all():
    _, there = blocks()
    assert repr(there).startswith("<fusion: ") and len(repr(there)) < 120
    assert len(repr(there.graphs[0])) < 80
    data = json.loads(there.to_json())
    assert data["target"] == "NVIDIA H200" and data["modules"]["11.norm"] == "LayerNorm"
    assert {s["module"] for s in data["graphs"][0]["sites"]} >= {"0.norm"}


def test_the_page_has_the_models_tree():
    _, there = blocks()
    html = there.to_html()
    assert html.startswith("<!doctype html>") and html.count("<details") >= 12
    assert '<span class="class">LayerNorm</span>' in html and "fused: layer_norm" in html
    assert not re.search(r"https?://|<script|src=", html), "self-contained"
    bad = Site("<b>", "x.py:1", False, "a < b & c", module="a.b")
    page = Report([GraphRecord(1, sites=[bad])]).to_html()
    assert (
        "&lt;b&gt;" in page
        and "a &lt; b &amp; c" in page
        and "<b>:" not in page
        and "a < b" not in page
    )
    assert there._repr_html_() in html


def test_paths_are_shortened_and_numbers_of_layers_folded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/a/b.py:3") == "a/b.py:3"
    assert short("at /x/lib/site-packages/timm/vit.py:3, say") == "at timm/vit.py:3, say"
    assert short("/other/c.py:3") == "/other/c.py:3" and short("/no/line.py") == "/no/line.py"
    assert folded("model.layers.11.mlp.0") == "model.layers.*.mlp.*"
    assert folded("timed at 0.98 of torch 2.11, at layers.3.norm") == (
        "timed at 0.98 of torch 2.11, at layers.*.norm"
    )


def test_of_a_graph_that_was_not_matched_nothing_is_said_about_patterns():
    text = str(Report([GraphRecord(3, error="RuntimeError: boom")]))
    assert "went to Inductor as it was" in text and "recognised. The operators" not in text


def test_a_path_that_sites_share_is_shown_as_it_is():
    where, reasons = "/v1.2/model.py:3", [f"it is read at {i}.norm" for i in range(2)]
    text = str(Report([GraphRecord(1, sites=[Site("gelu", where, False, r) for r in reasons])]))
    assert f"×2  {where}: it is read at *.norm" in text


def test_the_sample_of_the_readme_is_what_is_printed():
    """On the meta device: a model of any size needs no memory."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True)
        model = nn.TransformerEncoder(layer, 12).bfloat16()
        report = explain(model, torch.empty(32, 512, 1024, dtype=torch.bfloat16), target="H200")
    page = (Path(__file__).parent.parent / "README.md").read_text()
    (sample,) = re.findall(r"^```\n(fusion: .+?)```$", page, re.M | re.S)
    printed = report.text(width=100).replace(", as on an NVIDIA H200", "")
    assert printed.startswith(sample)


def test_a_process_without_graphs_says_so():
    fusion_backend.reset()
    assert "No graph was compiled" in str(fusion_backend.report())
