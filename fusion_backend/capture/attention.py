"""Attention in a form that a kernel may take, in the view. The code of the user is unchanged where
no site is accepted.

- Three dimensions, [batch, n, d], become those of one head: the product of the weights and the
  values becomes one of four, between views.
- Scores times a tensor that does not depend on the key, as a learnt temperature of each head,
  become those of the queries times this tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, is_mutation, name_of
from fusion_backend.compat.torch import aten

LARGEST = 256  # heads of the fused kernels of SDPA; Inductor is faster than its others
NEAR = 16  # operators between the two products
PRODUCTS = {"aten::bmm", "aten::matmul", "aten::baddbmm", "aten::einsum"}
SPLITS = {"aten::view", "aten::reshape", "aten::unflatten"}
SAME_ROWS = {"aten::to", "aten::_to_copy", "aten::type_as", "aten::dropout", "aten::contiguous"}
MARK = "only for attention"  # on nodes at which no pattern starts


def brought_to_form(
    view: View,
    fences: Collection[fx.Node] = (),
    chains: Mapping[fx.Node, list[fx.Node]] = MappingProxyType({}),
) -> None:
    """Give the product of weights and values a dimension for its only head, at every attention
    whose result is not seen with heads afterwards; and multiply the queries instead of the scores.
    chains: the operators that became functional in the view, and still write to memory in the
    graph, with the nodes that share that memory.
    """
    writers = [n for n in view.graph.nodes if is_mutation(n) or n.target is operator.setitem]
    written = set().union(*(storages(a) for n in writers for a in n.all_input_nodes))
    for n in list(view.graph.nodes):
        if n in fences or n not in view.owner or not is_lowered(n):
            continue
        # with a head the result is a view, through which AOTAutograd loses the gradient of
        # _foreach_mul_ and its like
        if weighs_values(n) and written.isdisjoint(storages(n)):
            add_head(view, n, chains)
        elif name_of(n) in ("aten::mul", "aten::div"):
            temper_queries(view, n, fences, chains)


def temper_queries(
    view: View, n: fx.Node, fences: Collection[fx.Node], in_place: Collection[fx.Node]
) -> None:
    """Write (q kᵀ) · t as (q · t) kᵀ, and a quotient likewise, where t is a single number or has a
    last dimension of 1, so that it is the same for all keys.
    """
    scores, factor = n.args[:2]
    if name_of(n) == "aten::mul" and not is_product(scores):
        scores, factor = factor, scores
    if not is_product(scores) or not isinstance(factor, fx.Node) or len(n.args) > 2 or n.kwargs:
        return
    q, k = scores.args
    if not small(q):
        return
    alone = scores not in fences and [*scores.users] == [n] and rank(factor) >= 0
    alone = alone and view.region.get(scores) == view.region.get(n)
    if not alone or not (rank(factor) == 0 or same(shape(factor)[-1:], (1,))):
        return
    if not quiet_between(scores, n, in_place):
        return
    graph, values = view.graph, (q.meta["val"], factor.meta["val"])
    with graph.inserting_before(n), values[0].fake_mode:
        tempered = n.target(*values)
        if tempered.dtype != values[0].dtype or not same(tempered.shape, values[0].shape):
            return
        new = graph.call_function(n.target, (q, factor))
        new.meta = dict(n.meta, val=tempered, **{MARK: True})
    scores.meta[MARK] = True  # nobody reads it any more
    n.target, n.args = scores.target, (new, k)
    told(view, new, n, q, factor)


def quiet_between(first: fx.Node, last: fx.Node, in_place: Collection[fx.Node]) -> bool:
    """Does nothing write to memory between two nodes?"""
    n = first.next
    while n is not last:
        if not is_lowered(n) or is_mutation(n) or n in in_place:
            return False
        n = n.next
    return True


def is_product(n) -> bool:
    """Is it a product of two batches of matrices?"""
    if not isinstance(n, fx.Node) or not is_lowered(n):
        return False
    if name_of(n) not in ("aten::bmm", "aten::matmul") or not plain(n):
        return False
    return all(rank(a) > 2 for a in n.args)


def plain(n: fx.Node) -> bool:
    """Has a product two operands and nothing more, such as the dtype of its result?"""
    return len(n.args) == 2 and not n.kwargs


def told(view: View, new: fx.Node, n: fx.Node, *sources: fx.Node) -> None:
    """Let the view know a new node in front of n, computed from others."""
    view.owner[new] = view.owner[n]
    if n in view.region:
        view.region[new] = view.region[n]
    if any(a in view.requires_grad for a in sources):
        view.requires_grad.add(new)


def weighs_values(n: fx.Node) -> bool:
    """Is it softmax(... q kᵀ ...) v of three dimensions, as one operator?"""
    if name_of(n) not in ("aten::bmm", "aten::matmul") or not plain(n):
        return False
    weights, values = n.args
    if not all(isinstance(a, fx.Node) and rank(a) == 3 for a in (weights, values)):
        return False
    if not small(values):
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
    """Is it computed from a product by few operators, all of three dimensions?"""
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


def add_head(view: View, n: fx.Node, chains: Mapping[fx.Node, list[fx.Node]]) -> None:
    """Write weights @ values, `[b, n, m]` @ `[b, m, d]`, as a product of `[b, 1, n, m]` and
    `[b, 1, m, d]` between views.
    """
    graph, val = view.graph, n.meta["val"]
    with graph.inserting_before(n), val.fake_mode:
        operands = [graph.call_function(aten.unsqueeze.default, (a, 1)) for a in n.args[:2]]
        for new, a in zip(operands, n.args, strict=False):
            new.meta = dict(n.meta, val=a.meta["val"].unsqueeze(1), **{MARK: True})
        product = graph.call_function(aten.matmul.default, tuple(operands))
        product.meta = dict(n.meta, val=val.unsqueeze(1))
    n.target, n.args, n.kwargs = aten.squeeze.dim, (product, 1), {}
    for new in operands:
        told(view, new, n, new.args[0])
    told(view, product, n, n)
    for members in {id(nodes): nodes for nodes in chains.values()}.values():
        if n in members:
            members.insert(members.index(n), product)


def small(heads: fx.Node) -> bool:
    """Has SDPA fused kernels for heads of this size?"""
    size = shape(heads)[-1]
    return isinstance(size, int) and size <= LARGEST


def shape(n: fx.Node):
    return n.meta["val"].shape


def rank(n: fx.Node) -> int:
    value = n.meta.get("val") if isinstance(n, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else -1
