"""What capture, match and rewrite cost for one graph node of a model."""

from __future__ import annotations

import contextlib

import torch

import fusion_backend
from benchmarks.subjects.tiny_models import Tiny

PHASES = ("capture_s", "match_s", "rewrite_s")


def once(tiny: Tiny, train: bool, dynamic: bool) -> dict[str, float]:
    """The nodes of a model's graphs, and the milliseconds a node of every phase."""
    model, inputs = tiny.model(), tiny.example(2, 16)
    torch.compiler.reset()
    with contextlib.nullcontext() if train else torch.no_grad():
        report = fusion_backend.explain(
            model, options={"fusion.gate": "always"}, dynamic=dynamic, **inputs
        )
    nodes = sum(graph.nodes for graph in report.graphs)
    cost = {
        phase: sum(getattr(graph, phase) for graph in report.graphs) * 1e3 / nodes
        for phase in PHASES
    }
    return cost | dict(nodes=nodes, sum=sum(cost.values()))
