"""Attention of three dimensions, [batch, n, d], seen in the view as attention of one head.

The kernels of attention take four dimensions. The product of the weights and the values becomes one
of four, between views; the code of the user is unchanged where no site is accepted.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, name_of
from fusion_backend.compat.torch import aten

NEAR = 16  # operators between the two products
PRODUCTS = {"aten::bmm", "aten::matmul", "aten::baddbmm", "aten::einsum"}
SPLITS = {"aten::view", "aten::reshape", "aten::unflatten"}
SAME_ROWS = {"aten::to", "aten::_to_copy", "aten::type_as", "aten::dropout", "aten::contiguous"}
MARK = "one head"  # on the nodes in front of the product


def with_one_head(view: View, fences: frozenset | set) -> None:
    """Give the product of weights and values a dimension for its only head, at every attention
    whose result is not seen with heads afterwards.
    """
    for n in list(view.graph.nodes):
        if n not in fences and n in view.owner and weighs_values(n):
            add_head(view, n)


def weighs_values(n: fx.Node) -> bool:
    """Is it softmax(... q kᵀ ...) v of three dimensions, as one operator?"""
    if not is_lowered(n) or name_of(n) not in ("aten::bmm", "aten::matmul"):
        return False
    weights, values = n.args[:2]
    if not all(isinstance(a, fx.Node) and rank(a) == 3 for a in (weights, values)):
        return False
    if not same(shape(weights)[:1], shape(values)[:1]) or any(sees_heads(u, n) for u in n.users):
        return False
    for _ in range(NEAR):
        if not is_lowered(weights) or name_of(weights) not in SAME_ROWS:
            break
        weights = weights.args[0]
    if not is_lowered(weights) or name_of(weights) != "aten::softmax" or rank(weights) != 3:
        return False
    return follows_product(weights.args[0])


def follows_product(n: fx.Node) -> bool:
    pending, seen = [n], set()
    while pending and len(seen) < NEAR:
        a = pending.pop()
        if a in seen or not is_lowered(a) or rank(a) != 3:
            continue
        if name_of(a) in PRODUCTS:
            return True
        seen.add(a)
        pending += a.all_input_nodes
    return False


def sees_heads(user: fx.Node, n: fx.Node) -> bool:
    """Does it separate heads that were folded into the batch?"""
    splits = is_lowered(user) and name_of(user) in SPLITS and rank(user) == 4
    return splits and same(shape(user)[2:], shape(n)[1:])


def add_head(view: View, n: fx.Node) -> None:
    graph, val = view.graph, n.meta["val"]
    with graph.inserting_before(n), val.fake_mode:
        operands = [graph.call_function(aten.unsqueeze.default, (a, 1)) for a in n.args[:2]]
        for new, a in zip(operands, n.args, strict=False):
            new.meta = dict(n.meta, val=a.meta["val"].unsqueeze(1), **{MARK: True})
        product = graph.call_function(aten.matmul.default, tuple(operands))
        product.meta = dict(n.meta, val=val.unsqueeze(1))
    n.target, n.args, n.kwargs = aten.squeeze.dim, (product, 1), {}
    for new in (*operands, product):
        view.owner[new] = view.owner[n]
        if n in view.region:
            view.region[new] = view.region[n]
    gradients = zip((*operands, product), (*operands_of(operands), n), strict=True)
    view.requires_grad |= {new for new, old in gradients if old in view.requires_grad}


def operands_of(nodes: list[fx.Node]) -> list[fx.Node]:
    return [n.args[0] for n in nodes]


def shape(n: fx.Node):
    return n.meta["val"].shape


def rank(n: fx.Node) -> int:
    value = n.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1
