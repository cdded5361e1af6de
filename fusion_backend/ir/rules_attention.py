"""Rules of softmax and attention: softmax(scale · q kᵀ + mask) v. `scores.py` brings the scores to
one form, `heads.py` gives folded heads a dimension.
"""

from __future__ import annotations

import math

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, is_const, number_and_rest, peel
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.rules_pointwise import choice
from fusion_backend.ir.rules_shape import over_channels, repeated, undetached
from fusion_backend.ir.schema_args import Call
from fusion_backend.ir.scores import scaled


@rule("aten::softmax")
def softmax(c: Builder, call: Call, self: Expr, dim: int, dtype: torch.dtype | None):
    if not call.shape:  # of a single number
        return None
    if dtype is not None:
        self = c.cast(self, call["self"].dtype, dtype, call.shape)
    return softmax_of(c, self, dim % len(call.shape) - len(call.shape), call.shape)


def softmax_of(c: Builder, x: Expr, axis: int, shape) -> Expr:
    x = without_largest(x, (axis,)) or x
    if over_channels(axis, shape):
        return c.make("channel_softmax", (x,), "softmax", shape)
    return c.make("softmax", (scaled(c, x) if axis == -1 else x,), axis, shape)


def without_largest(x: Expr, axes: tuple[int, ...]) -> Expr | None:
    """z of z − max(z). A softmax does not change with what is subtracted from all elements of a
    row, so that no gradient passes through the maximum, detached or not.
    """
    x = peel(x)
    for z, shift in (x.args, x.args[::-1]) if x.op == "add" else ():
        minus, largest = number_and_rest(shift) if shift.op == "mul" else (None, None)
        if minus is None or not is_const(minus) or minus.attr != -1.0:
            continue
        largest = undetached(largest)
        if largest.op != "amax" or largest.attr != axes:
            continue
        if peel(largest.args[0]) is peel(z):
            return z
    return None


@composite("div")
def softmax_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """exp(z) / sum(exp(z)), where z has its largest value subtracted.

    A composite and no spelling of the pattern `softmax`: the scores inside must be brought to one
    scale before the templates of attention, which contain a softmax too, are compared with them.
    """
    if x.op != "exp" or y.op != "sum" or y.args[0] is not x or len(y.attr) != 1:
        return None
    z = without_largest(x.args[0], y.attr)
    return None if z is None else softmax_of(c, z, y.attr[0], shape)


@rule("aten::scaled_dot_product_attention")
def attention(
    c: Builder,
    call: Call,
    query: Expr,
    key: Expr,
    value: Expr,
    attn_mask: Expr | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
):
    shapes = (query.shape, key.shape, value.shape)
    if None in shapes or not (isinstance(query.shape[-1], int) or scale is not None):
        return None
    if enable_gqa:
        key, value = (for_heads(c, x, query.shape[-3]) for x in (key, value))
    shape = (*call.shape[:-1], key.shape[-2])
    transposed = c.transpose(key, -2, -1, (*key.shape[:-2], key.shape[-1], key.shape[-2]))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = c.make("matmul", (query, transposed), None, shape)
    scores = c.make("mul", (scores, c.const(scale)), None, shape)
    boolean = attn_mask is not None and call["attn_mask"].dtype == torch.bool
    if boolean:
        scores = choice(c, attn_mask, scores, c.const(-math.inf), shape)
    elif attn_mask is not None:
        scores = c.add(scores, attn_mask, shape)
    if is_causal:
        scores = c.make("causal", (scores,), None, shape)
    # a fully masked row is 0 here, and NaN if written by hand
    p = c.make("masked_softmax" if boolean else "softmax", (scores,), -1, shape)
    if dropout_p:
        p = c.make("dropout", (p, c.const(dropout_p)), call.node.name, shape)
    return c.make("matmul", (p, value), None, call.shape)


def for_heads(c: Builder, x: Expr, heads) -> Expr:
    """Keys or values, repeated where there are fewer heads of them than of queries."""
    if same(x.shape[-3:-2], (heads,)):
        return x
    return repeated(c, x, heads // x.shape[-3], (*x.shape[:-3], heads, *x.shape[-2:]))
