"""On a GPU: what benchmarks.models says about memory, kernels and contenders that need too much."""

import gzip
import json

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.model_runs.measuring import measure
from benchmarks.model_runs.steps import Plan
from benchmarks.records.rows import FAILED, OK, ModelRow
from benchmarks.records.runs import Run
from benchmarks.subjects.subject import Subject

pytestmark = pytest.mark.gpu


def test_kernels_of_a_model_by_class(tmp_path):
    out, traces = tmp_path / "run.json", tmp_path / "traces"
    argv = [
        "--model",
        "plain_bert",
        "--mode",
        "train",
        "--size",
        "tiny",
        "--gate",
        "always",
        "--once",
        "--rounds",
        "3",
    ]
    assert models.main([*argv, "--out", str(out), "--trace", str(traces)]) == 0
    (row,) = Run.load(out).rows
    assert row.dtype == "bf16" and row.exact == "float32"
    for one in row.contenders:
        assert one.peak_bytes > 0 and one.device_ms > 0 and one.shares["matmul"] > 0
        assert ("ours" in one.shares) == (one.name == "fusion"), one.kernels
    events = json.loads(gzip.open(traces / "plain_bert-train-fusion.json.gz").read())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_a_contender_that_needs_too_much_memory_leaves_the_others_alone():
    device = torch.device("cuda")
    subject = Subject("mine", nn.Linear(64, 64).to(device), (torch.randn(8, 64, device=device),))
    row = ModelRow("mine", "infer", "f32", {}, None, [])

    def greedy(step):
        return lambda x: step(x) + torch.empty(1 << 43, device=device).sum()

    plan = Plan(rounds=3, least_ms=1, warm=False)
    row = measure(
        subject, {"eager": lambda step: step, "greedy": greedy}, plan, row, device, lambda _: None
    )
    assert [one.status for one in row.contenders] == [OK, FAILED]
    assert row.of("greedy").note.startswith("out of memory") and row.of("eager").step
