"""explain(model, *inputs): what the backend would do, without compiling anything."""

from __future__ import annotations

import torch

from fusion_backend import reporting
from fusion_backend.backend import fuse_graph, patterns
from fusion_backend.compat.torch import many_recompiles
from fusion_backend.options import parse


class Collector:
    """A backend that runs the pass, keeps what came out and runs the graph eagerly."""

    def __init__(self, options: dict | None):
        self.options, _ = parse(options, [p.name for p in patterns()])
        self.report = reporting.Report()
        self.graphs: list[torch.fx.GraphModule] = []
        self.sources: list[torch.fx.GraphModule] = []

    def __call__(self, gm, example_inputs):
        record = reporting.GraphRecord(len(gm.graph.nodes))
        self.report.graphs.append(record)
        new, _ = fuse_graph(gm, self.options, record)
        self.sources.append(gm)
        self.graphs.append(new)
        return new.forward


def explain(model, *inputs, options: dict | None = None, dynamic: bool | None = None, **kwargs) -> reporting.Report:
    """Run `model(*inputs, **kwargs)` once, eagerly, and report every site: fused or not, and why.

    options: the `fusion.*` options of torch.compile. Call it as the model will be called: under torch.no_grad() for
    inference, under autocast if you train so. Print the result, or take its `.to_json()`. Raises what the model raises.
    """
    collector = Collector(options)
    with many_recompiles():
        torch.compile(model, backend=collector, dynamic=dynamic)(*inputs, **kwargs)
    return collector.report
