"""explain(..., target="H200") on a machine without a GPU decides as the tables do on an H200."""

import dataclasses

import pytest
import torch

from benchmarks.subjects.model_zoo import ENTRIES, build
from benchmarks.subjects.one_site import INFERENCE
from benchmarks.subjects.subject import INFER, TRAIN
from fusion_backend import explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name(),
        reason="needs an H200",
    ),
]


def decided(model, inputs: tuple, mode: str, target: str | None) -> list[tuple]:
    with torch.set_grad_enabled(mode == TRAIN):
        report = explain(model, *inputs, target=target, options={"fusion.gate": "table"})
    assert not any(g.error or g.faults for g in report.graphs), str(report)
    return [
        (s.pattern, s.module, s.fused, s.forward, s.backward, s.cause, s.reason)
        for s in report.sites
    ]


@pytest.mark.parametrize("mode", [INFER, TRAIN])
@pytest.mark.parametrize("name", ["plain_llama", "plain_gpt2", "plain_bert", "plain_vit"])
def test_models_at_their_size(name, mode):
    """Elsewhere on the meta device: no weights, no memory."""
    size = dataclasses.replace(ENTRIES[name].full, layers=2, batch=2)
    here = build(name, mode, size, "sdpa", torch.device("cuda"), torch.bfloat16)
    there = build(name, mode, size, "sdpa", torch.device("meta"), torch.bfloat16)
    found = decided(here, (), mode, None)
    assert any(fused for _, _, fused, *_ in found)
    assert decided(there, (), mode, "H200") == found


@pytest.mark.parametrize("name", [n for n in INFERENCE if "batch_norm" not in n])
def test_single_sites(name):
    model, inputs, *_ = INFERENCE[name]()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    there = decided(model, inputs, INFER, "H200")
    moved = tuple(t.cuda() for t in inputs)
    assert decided(model.cuda(), moved, INFER, None) == there
