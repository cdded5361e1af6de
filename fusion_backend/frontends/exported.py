"""fuse(exported_program): the same passes on a torch.export program, whose graph is rewritten
directly.

Exported programs have no Dynamo graph: their nodes are ATen above autograd already, and state
regions (no_grad, autocast) are submodules. Each is matched by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fusion_backend import dump
from fusion_backend.capture.view import View, state_key
from fusion_backend.compat.torch import (
    fake_mode_of,
    name_again,
    no_new_guards,
    refusals_unlogged,
    tracing_under,
)
from fusion_backend.frontends.loading import names, patterns, usable
from fusion_backend.measure.judge import Judge
from fusion_backend.options import Options, parse
from fusion_backend.pipeline import Scope, run
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.rewrite.writer import copied, put

# Options about compilations, of which there is none here.
COMPILING = ("verify", "measure_s")


def fuse(program: ExportedProgram, **options: Any) -> ExportedProgram:
    """A new exported program with `torch.ops.fusion.*` at the accepted sites; the given one is not
    changed.

    options: only, skip, limit, gate, as in torch.compile's `fusion.*`. The sites are added to
    `fusion_backend.report()`. Raises TypeError for a module or function that is not exported, and
    ValueError for an unknown option.
    """
    check(program, options)
    ours, _ = parse({f"fusion.{k}": v for k, v in options.items()}, names())
    record = GraphRecord(len(program.graph.nodes))
    reporting.add(record)
    root = copied(program.graph_module)
    mode = fake_mode_of(root)
    with tracing_under(mode), refusals_unlogged(), no_new_guards(mode):
        fuse_module(root, ours, record, torch.is_grad_enabled())
    reporting.log(record)
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def check(program: Any, options: dict[str, Any]) -> None:
    """Check that `fuse` was given a program, and options that have a meaning here."""
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"fuse takes a torch.export.ExportedProgram, not {type(program).__name__}: call "
            "torch.export.export(model, inputs) first, or compile the model with "
            'torch.compile(model, backend="fusion")'
        )
    valid = [f.name for f in dataclasses.fields(Options) if f.name not in COMPILING]
    if unknown := [name for name in options if name not in valid]:
        raise ValueError(
            f"fuse has no option {unknown[0]}; it has {', '.join(valid)}. It compiles nothing: "
            "options of Inductor go to whatever compiles the program that it returns"
        )


def fuse_module(gm: fx.GraphModule, options: Options, record, grad: bool) -> None:
    """Match, decide and write one graph; state regions inside it with their own state."""
    for n in list(gm.graph.nodes):
        if getattr(n.target, "__name__", "") != "wrap_with_set_grad_enabled":
            continue
        fuse_module(getattr(gm, n.args[1].target), options, record, n.args[0])
    with torch.set_grad_enabled(grad):
        key = state_key(None)
    nodes = list(gm.graph.nodes)
    trains = {
        n
        for n in nodes
        if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].requires_grad
    }
    region = {n: key for n in nodes if n.op == "call_function"}
    view = View(gm, gm.graph, {}, {}, region, trains, {}, {})
    top = Scope(view, {}, result=gm)
    with dump.into(options.dump) as dumped:
        dumped.view(top)
        run(top, Judge(options, record, False), record, usable(patterns()), dumped)
        replaced: dict[fx.Node, fx.Node] = {}
        for d in top.decisions:
            if d.fused:
                write(gm.graph, d, replaced)
        gm.graph.lint()
        gm.recompile()
        dumped.result(top)


def write(graph: fx.Graph, d, replaced: dict[fx.Node, fx.Node]) -> None:
    _, results = put(graph, d, lambda n: replaced.get(n, n))
    replaced |= results
    for root, result in results.items():
        name = root.name
        root.replace_all_uses_with(result)
        graph.erase_node(root)
        name_again(result, name)  # the graph signature knows outputs by name
    unread = (r for r in d.match.roots if r not in results)
    for n in sorted({*d.match.interior, *unread}, reverse=True):
        if not n.users:
            graph.erase_node(n)
