"""explain(model, *inputs): what the backend would do, without compiling anything."""

from __future__ import annotations

from typing import Any

import torch

from fusion_backend.compat.torch import many_recompiles
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.frontends.run_unchanged import untouched
from fusion_backend.options import parse
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting import report as reporting


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
        new, _ = fuse_graph(gm, self.options, record, usable(patterns()))
        self.sources.append(gm)
        self.graphs.append(new)
        return new.forward


def run(
    model, inputs: tuple, keywords: dict, collector: Collector, dynamic: bool | None = None
) -> None:
    """Compile with a collector and run once; what the model writes to is put back."""
    with many_recompiles(), untouched(model, inputs, keywords):
        torch.compile(model, backend=collector, dynamic=dynamic)(*inputs, **keywords)


def explain(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    kwargs: dict[str, Any] | None = None,
    **keywords: Any,
) -> reporting.Report:
    """Run `model(*inputs, **keywords)` once, eagerly, and report every site: fused or not, and why.

    options: the `fusion.*` options of torch.compile; dynamic: as torch.compile takes it; kwargs:
    the model's own keywords of these three names, `kwargs={"dynamic": True}`.

    Call it as the model will be called: under torch.no_grad() for inference, under autocast if you
    train so. Print the result, or take its `.to_json()`. Raises what the model raises.

    Afterwards everything is as it was: tensors that are written to (inputs, buffers, running
    statistics, globals), gradients, the random state of torch and Python, and the attributes,
    lists, dicts and sets that can be reached from the model and its inputs. Only what is written to
    is copied meanwhile. Not undone is what a model does outside of torch and of these objects (a
    global name it assigns, a file, a print), nor that a tensor with a history of its own that is
    written to in place has this in its history.
    """
    collector = Collector(options)
    run(model, inputs, {**keywords, **(kwargs or {})}, collector, dynamic)
    return collector.report
