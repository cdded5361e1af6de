"""Finds the arguments of the bodies of higher-order operators, such as activation checkpoints, in
the graph around them.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View


def arguments_of_body(call: fx.Node, body: View) -> list[tuple[fx.Node, fx.Node]]:
    """Each placeholder of a body with the operand that a call passes for it. The arguments of the
    body are the last operands of the call; the list is empty where types or shapes do not agree.
    """
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    operands: list[fx.Node] = []
    fx.node.map_arg(call.args, operands.append)
    pairs = list(zip(placeholders, operands[len(operands) - len(placeholders) :], strict=False))
    fits = len(operands) >= len(placeholders) and all(
        same_kind(p.meta["val"], o.meta.get("val")) for p, o in pairs
    )
    return pairs if fits else []


def same_kind(a, b) -> bool:
    """Are both tensors of one dtype and shape, or else of one Python type?"""
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same(a.shape, b.shape)


def calls(view: View, name: str) -> list[fx.Node]:
    """The nodes that call the body of this name."""
    return [
        n
        for n in view.graph.nodes
        if any(is_body(a) and a.target == name for a in n.all_input_nodes)
    ]


def is_body(n: fx.Node) -> bool:
    """Is the node a get_attr of a graph module, rather than of a tensor?"""
    return n.op == "get_attr" and not isinstance(n.meta.get("val"), torch.Tensor)


def outside(view: View, name: str) -> dict[fx.Node, fx.Node]:
    """Placeholder of a body -> the node outside that is its argument, where every call passes the
    same node.
    """
    by_call = [arguments_of_body(call, view.bodies[name]) for call in calls(view, name)]
    first = by_call[0] if by_call else []
    return {p: o for p, o in first if all((p, o) in pairs for pairs in by_call)}
