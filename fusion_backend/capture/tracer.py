"""Dynamo graph -> view: ATen above autograd, read by the matcher and never compiled.

Nodes that are understood are lowered; the others are copied verbatim, and no match crosses them.
The view maps each of its nodes to the Dynamo node it came from (`owner`), and each Dynamo node to
the view nodes that hold its result (`value`).
"""

from __future__ import annotations

import contextlib
import operator

import torch
from torch import fx

from fusion_backend.capture.interpreter import CaptureInterpreter
from fusion_backend.capture.predicted_writes import PredictedWrites
from fusion_backend.capture.view import View, is_lowered, is_mutation
from fusion_backend.compat.torch import fake_mode_of, pytree, trace

# Higher-order operators whose bodies are ordinary code run once, in order.
BODIES = {"tag_activation_checkpoint", "invoke_subgraph", "cond"}


def capture(gm: fx.GraphModule) -> View | None:
    """The view of a Dynamo graph; None when it holds no tensor to look at.

    A call that is lowered without running it has Dynamo's own values, as they are at the end of the
    graph and in Dynamo's storages. So calls that touch written memory are run, and all calls are
    run if a write was not predicted.
    """
    writes = PredictedWrites(gm)
    view = trace_view(gm, writes)
    if view is not None and any(unpredicted_write(n, view, writes) for n in view.graph.nodes):
        view = trace_view(gm, None)
    return view


def unpredicted_write(n: fx.Node, view: View, writes: PredictedWrites) -> bool:
    """Does, or may, this node write to memory although the name of its call does not say so?"""
    owner = view.owner.get(n)
    may_write = (
        is_mutation(n) if is_lowered(n) else owner in view.copied and bool(n.all_input_nodes)
    )
    return may_write and owner not in writes.writers


def trace_view(gm: fx.GraphModule, writes: PredictedWrites | None) -> View | None:
    """The view of a Dynamo graph; calls that `writes` does not touch need not be run. With None all
    are run.
    """
    fake_mode = fake_mode_of(gm)
    if fake_mode is None:
        return None
    bodies = {name: capture(body) for name, body in inner_bodies(gm)}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    examples = [n.meta["example_value"] for n in placeholders]
    interpreter = CaptureInterpreter(gm, writes)
    with preserved_state():
        traced = trace(lambda *args: interpreter.run(*args), examples, fake_mode)
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for mine, theirs, example in zip(inputs, placeholders, examples, strict=True):
        interpreter.value[theirs] = mine
        interpreter.owner[mine] = theirs
        if isinstance(example, torch.Tensor) and example.requires_grad:
            interpreter.requires_grad.add(mine)
    live = set(traced.graph.nodes)
    value = {
        n: pytree.tree_map(lambda v: None if isinstance(v, fx.Node) and v not in live else v, v)
        for n, v in interpreter.value.items()
    }
    return View(
        gm, traced.graph, interpreter.owner, value, interpreter.region, interpreter.requires_grad,
        interpreter.copied, {name: body for name, body in bodies.items() if body is not None},
    )  # fmt: skip


@contextlib.contextmanager
def preserved_state():
    """Restore grad mode and autocast, whatever the captured graph does to them."""
    grad = torch.is_grad_enabled()
    cast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
    cache = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, (on, dtype) in cast.items():
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)


def inner_bodies(gm: fx.GraphModule):
    """Bodies of activation checkpoints, invoke_subgraph and cond that are traced like the graph
    itself: (get_attr target, graph module).
    """
    seen = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in BODIES:
            continue
        for arg in node.all_input_nodes:
            if arg.op != "get_attr" or arg.target in seen:
                continue
            body = operator.attrgetter(arg.target)(gm)
            if not isinstance(body, fx.GraphModule) or "_checkpoint_context_fn" in body.meta:
                # a selective-checkpoint policy decides operator by operator: keep the operators
                continue
            if all("example_value" in p.meta for p in body.graph.nodes if p.op == "placeholder"):
                seen.add(arg.target)
                yield arg.target, body
