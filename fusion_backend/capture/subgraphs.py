"""Bodies of higher-order operators, such as activation checkpoints: what of the graph around them
is theirs.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.functionalize import storages
from fusion_backend.capture.sizes import same
from fusion_backend.capture.tracer import View, is_lowered
from fusion_backend.compat.torch import schema_of


def given(call: fx.Node, body: View) -> list[tuple[fx.Node, fx.Node]]:
    """The placeholders of a body with what a call gives for them, its last operands; none where
    they do not agree.
    """
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operands: list[fx.Node] = []
    fx.node.map_arg(call.args, operands.append)
    pairs = list(zip(placeholders, operands[len(operands) - len(placeholders) :], strict=False))
    fits = len(operands) >= len(placeholders) and all(
        alike(p.meta["val"], o.meta.get("val")) for p, o in pairs
    )
    return pairs if fits else []


def alike(a, b) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same(a.shape, b.shape)


def calls(view: View, name: str) -> list[fx.Node]:
    return [
        n
        for n in view.graph.nodes
        if any(is_body(a) and a.target == name for a in n.all_input_nodes)
    ]


def is_body(n: fx.Node) -> bool:
    return n.op == "get_attr" and not isinstance(n.meta.get("val"), torch.Tensor)


def outside(view: View, name: str) -> dict[fx.Node, fx.Node]:
    """The placeholders of a body and what they are in the graph around it, the same in
    every call.
    """
    pairs = [given(call, view.bodies[name]) for call in calls(view, name)]
    found = dict(pairs[0]) if pairs else {}
    return {p: o for p, o in found.items() if all((p, o) in others for others in pairs)}


def written_by(n: fx.Node, view: View, inside: dict[str, dict]) -> set[int]:
    """The storages that a node may write to: of in-place operators that stayed in place, and of
    copied nodes, which may do anything to their arguments. `inside` has the writers of the bodies;
    their results are other memory.
    """
    if is_lowered(n):
        may = schema_of(n.target).is_mutable
    else:
        may = (
            n.op in ("call_function", "call_method", "call_module")
            and view.owner.get(n) in view.kept
        )
    if not may:
        return set()
    everything = set().union(*map(storages, n.all_input_nodes))
    names = [a.target for a in n.all_input_nodes if is_body(a)]
    if not names or not all(name in inside and given(n, view.bodies[name]) for name in names):
        return everything
    found: set[int] = set()
    for name in names:
        body = view.bodies[name]
        (output,) = [m for m in body.graph.nodes if m.op == "output"]
        touched = {*inside[name]}.union(*map(storages, output.all_input_nodes))
        found |= set().union(*(storages(o) for p, o in given(n, body) if storages(p) & touched))
    return found
