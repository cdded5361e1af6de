"""Attention without a dimension for the heads, [batch, n, m], seen with one.

Either the heads were folded into the batch, and a later view separates them again, or there is one
head. The dimension moves to the operands. Those of folded heads are mostly views themselves, of the
tensors with heads.
"""

from __future__ import annotations

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, NUMBERS, Expr

# Operators around scores and weights that treat all matrices of a batch alike.
AROUND = {"cast", "add", "mul", "div", "where", "tanh", "dropout", "soft_cap", "causal"}
SOFTMAX = ("softmax", "masked_softmax")


def splits(folded, shape) -> bool:
    """Does the shape have two dimensions in place of the first of three?"""
    if folded is None or shape is None or (len(folded), len(shape)) != (3, 4):
        return False
    return same(folded[1:], shape[2:])


def weights_times_values(e: Expr) -> bool:
    """Is it softmax(...) @ v, of three dimensions each?"""
    if e.op != "matmul" or any(a.shape is None or len(a.shape) != 3 for a in e.args):
        return False
    weights = e.args[0]
    for _ in range(LOOKED_THROUGH):
        if weights.op not in ("cast", "dropout", "view"):
            break
        weights = weights.args[0]
    return weights.op in SOFTMAX


def holds_product(x: Expr) -> bool:
    """Is it made of a product of two batches of matrices, as scores and weights are?"""
    pending, left = [x], LOOKED_THROUGH
    while pending and left:
        e, left = pending.pop(), left - 1
        if e.op == "matmul":
            return all(a.shape is not None and len(a.shape) > 2 for a in e.args)
        pending += e.args if e.op in AROUND or e.op in ("view", *SOFTMAX) else ()
    return False


def operand(c: Builder, e: Expr, lead: tuple, depth: int = LOOKED_THROUGH) -> Expr:
    """What a graph gives to the products or adds to the scores, with a dimension for the heads: the
    tensor that was folded, or else a view, which no node may hold. Factors and casts are passed.
    """
    if e.shape is None or len(e.shape) < 3 or same(e.shape[:1], (1,)):
        return e
    shape, base = (*lead, *e.shape[1:]), e
    while base.op in ("view", "rows"):
        base = base.args[0]
    if same(base.shape or (), shape):
        return base
    transposed = e.op == "permute" and len(e.attr) == 2
    factor = e.op in ("mul", "div") and e.args[-1 if e.op == "div" else 0].op in NUMBERS
    factor = factor or (e.op == "mul" and e.args[1].op in NUMBERS)
    if depth and (transposed or factor or e.op == "cast"):
        args = [operand(c, a, lead, depth - 1) for a in e.args]
        return made_as(c, e, e.op, args, e.attr, shape)
    if same(lead[1:], (1,)):
        return made_as(c, e, "unsqueeze", (e,), -3, shape)
    found = made_as(c, e, "view", (base,), str(shape), shape)
    found.rows = found.rows or e
    return found


def made_as(c: Builder, e: Expr, op: str, args, attr, shape) -> Expr:
    """A new expression in the grad mode and autocast of another."""
    state, c.state = c.state, e.state
    try:
        return c.make(op, args, attr, shape)
    finally:
        c.state = state
