"""explain(model, *inputs): what the backend would do, without compiling anything."""

from __future__ import annotations

from typing import Any

import torch

from fusion_backend.compat.memory import saves_unseen
from fusion_backend.compat.torch import graph_break, inductor, inductor_config, many_recompiles
from fusion_backend.frontends.loading import names, patterns, usable
from fusion_backend.frontends.run_unchanged import untouched
from fusion_backend.kernels.common.target import GPU, as_on, gpu
from fusion_backend.options import parse
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.reporting.report import Report


class Collector:
    """A backend that runs the passes, keeps their results and runs the graph eagerly: the rewritten
    one, or the original one if another GPU is asked about.
    """

    def __init__(self, options: dict | None, target: GPU | None = None):
        self.options, theirs = parse(options, names())
        # refuses what torch.compile would refuse
        self.config = inductor(None, theirs).config
        self.target = target
        self.report = Report(target=target and target.name)
        self.graphs: list[torch.fx.GraphModule] = []
        self.sources: list[torch.fx.GraphModule] = []

    def __call__(self, gm, example_inputs):
        record = GraphRecord(len(gm.graph.nodes), broken=graph_break(gm))
        self.report.graphs.append(record)
        with as_on(self.target), inductor_config.patch(self.config), saves_unseen():
            new, _ = fuse_graph(gm, self.options, record, usable(patterns()), compiles=False)
        self.sources.append(gm)
        self.graphs.append(new)
        return (gm if self.target else new).forward


def run(
    model, inputs: tuple, keywords: dict, collector: Collector, dynamic: bool | None = None
) -> None:
    """Compile with a collector and run once; everything that the model writes to is restored."""
    with many_recompiles(), untouched(model, inputs, keywords):
        torch.compile(model, backend=collector, dynamic=dynamic)(*inputs, **keywords)


def classes_of(model: Any) -> dict[str, str]:
    """The path and the class of each module inside a model; empty for another callable."""
    named = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    return {name: type(module).__name__ for name, module in named}


def explain(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    target: str | None = None,
    kwargs: dict[str, Any] | None = None,
    **keywords: Any,
) -> Report:
    """Run `model(*inputs, **keywords)` once, eagerly, and report every site: fused or not, and why.

    options: those of torch.compile, such as `fusion.gate`; dynamic: as torch.compile takes it.
    target: decide as on one of these GPUs, "H200", "H100", "A100", ..., which need not be there:
    the model runs where it is, and its tensors are treated as tensors on that GPU. kwargs: the
    model's own keywords of these four names, `kwargs={"dynamic": True}`.

    Call it as the model will be called: under torch.no_grad() for inference, under autocast if you
    train under autocast. Print the result, or take its `text(verbose=True)`, `to_json()` or
    `to_html()`. Raises what the model raises, ValueError for an unknown target or option of ours,
    and RuntimeError for an unknown option of Inductor's.

    Afterwards everything is as it was: tensors that are written to (inputs, buffers, running
    statistics, globals), gradients, the random state of torch and Python, and the attributes,
    lists, dicts and sets that can be reached from the model and its inputs. Only what is written to
    is copied meanwhile. What a model does outside torch and these objects is not undone (a global
    name it assigns, a file, a print). If it writes in place to a tensor that has an autograd
    history, the write stays in that history.
    """
    collector = Collector(options, gpu(target) if target is not None else None)
    collector.report.modules = classes_of(model)
    run(model, inputs, {**keywords, **(kwargs or {})}, collector, dynamic)
    return collector.report
