"""What the passes have made, as text: fusion.dump, and torch's structured trace."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._logging._internal import trace_log
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import dump, explain

FILES = ["1_view", "2_canonical", "3_candidates", "4_decisions", "5_rewritten"]


def model(x, w):
    y = F.layer_norm(x, (8,), w, w)
    return y + checkpoint(lambda y: F.rms_norm(y, (8,), w), y, use_reentrant=False)


def dumped(folder, **options) -> dict[str, str]:
    x = torch.randn(4, 8, requires_grad=True)
    options = {"fusion.dump": folder, "fusion.gate": "always"} | options
    explain(model, x, torch.randn(8), options=options)
    return {p.stem: p.read_text() for p in sorted(folder.glob("graph_0/*.txt"))}


def test_every_pass_is_written(tmp_path):
    texts = dumped(tmp_path)
    assert [*texts] == FILES
    assert all("graph\n-----\n" in text and "body wrap_body_0\n" in text for text in texts.values())
    assert "layer_norm: float32[4, 8] = aten.layer_norm.default(" in texts["1_view"]
    assert "= rsqrt(#" in texts["2_canonical"] and "layer_norm is #" in texts["2_canonical"]
    assert "layer_norm(x=" in texts["3_candidates"] and "near miss" in texts["3_candidates"]
    decisions = texts["4_decisions"]
    assert "fusion.rms_norm.default, forward reference, backward vjp" in decisions
    assert f"{__file__}:" in decisions, "the user's line"
    rows = {line.split()[0]: line.split() for line in decisions.splitlines() if line}
    assert rows["rule"][1:] == ["tried", "matched", "fused", "ms"]
    assert rows["layer_norm"][2:4] == ["1", "1"] and rows["rms_norm"][2:4] == ["1", "1"]
    assert "fusion.layer_norm.default(" in texts["5_rewritten"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph_0"]


def test_every_graph_has_a_folder(tmp_path):
    dumped(tmp_path)
    dumped(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph_0", "graph_1"]


def test_an_exported_program_is_dumped(tmp_path):
    class Norm(torch.nn.Module):
        def forward(self, x, w):
            return F.layer_norm(x, (8,), w, w)

    program = torch.export.export(Norm(), (torch.randn(4, 8), torch.randn(8)))
    fusion_backend.fuse(program, gate="always", dump=str(tmp_path))
    texts = {p.stem: p.read_text() for p in sorted(tmp_path.glob("graph_0/*.txt"))}
    assert [*texts] == FILES and "fusion.layer_norm.default(" in texts["5_rewritten"]
    assert "aten.layer_norm.default(" in texts["1_view"]


def test_a_directory_that_cannot_be_written_to_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="nothing is written to fusion.dump"):
        assert dumped(tmp_path / "file") == {}


def test_a_text_that_fails_costs_a_warning(tmp_path, monkeypatch):
    def boom(scope):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(dump, "candidates_text", boom)
    with pytest.warns(RuntimeWarning, match="3_candidates is not dumped: ZeroDivisionError: boom"):
        texts = dumped(tmp_path)
    assert [*texts] == [name for name in FILES if name != "3_candidates"]
    assert "fusion.layer_norm.default(" in texts["5_rewritten"]


def test_the_directory_is_checked_and_is_no_part_of_a_cache_key():
    with pytest.raises(ValueError, match="fusion.dump is 3; it must be a directory"):
        explain(torch.sin, torch.ones(2), options={"fusion.dump": 3})
    from fusion_backend.options import parse

    assert str(parse({"fusion.dump": "a"}, [])[0]) == str(parse({"fusion.dump": "b"}, [])[0])


class Artifacts(logging.Handler):
    """Keeps what TORCH_TRACE would write: the texts by their names."""

    def __init__(self):
        super().__init__()
        self.texts: dict[str, str] = {}

    def emit(self, record):
        if artifact := record.metadata.get("artifact"):
            self.texts[artifact["name"]] = record.payload


def test_the_structured_trace_has_the_same_texts():
    seen = Artifacts()
    trace_log.addHandler(seen)
    try:
        explain(lambda x: F.softmax(x * 2, -1), torch.randn(4, 8))
    finally:
        trace_log.removeHandler(seen)
    assert {name for name in seen.texts if "fusion" in name} == {f"fusion_{f}" for f in FILES}
    assert "softmax: float32[4, 8] = aten.softmax.int" in seen.texts["fusion_1_view"]
