"""Rules of softmax and attention: softmax(scale · q kᵀ + mask) v.

The scale is moved to the scores, wherever the graph multiplies by it, and is explicit even if it is
1. Capped scores, cap · tanh(scores / cap), are one operator around the scores.
"""

from __future__ import annotations

import math

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, NUMBERS, Expr, is_const, number_and_rest, peel
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.rules_pointwise import choice
from fusion_backend.ir.rules_shape import repeated
from fusion_backend.ir.schema_args import Call


@rule("aten::softmax")
def softmax(c: Builder, call: Call, self: Expr, dim: int, dtype: torch.dtype | None):
    if not call.shape:  # of a single number
        return None
    if dtype is not None:
        self = c.cast(self, call["self"].dtype, dtype, call.shape)
    return softmax_of(c, self, dim % len(call.shape) - len(call.shape), call.shape)


def softmax_of(c: Builder, x: Expr, axis: int, shape) -> Expr:
    return c.make("softmax", (scaled(c, x) if axis == -1 else x,), axis, shape)


@composite("div")
def softmax_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """exp(z) / sum(exp(z)), where z has its largest value subtracted.

    A composite and no spelling of the pattern `softmax`: the scores inside must be brought to one
    scale before the templates of attention, which contain a softmax too, are compared with them.
    """
    if x.op != "exp" or y.op != "sum" or y.args[0] is not x or len(y.attr) != 1:
        return None
    z = x.args[0]
    for inner, shift in (z.args, z.args[::-1]) if z.op == "add" else ():
        minus, largest = number_and_rest(shift) if shift.op == "mul" else (None, None)
        if minus is not None and is_const(minus) and minus.attr == -1.0 and largest.op == "amax":
            if largest.args[0] is inner and largest.attr == y.attr:
                return softmax_of(c, inner, y.attr[0], shape)
    return None


# The scale of scores.


def scaled(c: Builder, x: Expr) -> Expr:
    """Scores, which may be capped, with one explicit scale; any other value unchanged. A masking
    around the scores stays.

    There may be as many sums as the graph is deep, and they may read one another: each is visited
    once, without recursion.
    """
    pending = [x]
    while pending:
        e = pending.pop()
        operands = e.args if surrounds_scores(e) else ()
        waiting = [a for a in operands if a not in c.scores]
        if waiting:
            pending += [e, *waiting]
        elif e not in c.scores:
            c.scores[e] = in_own_region(c, e, [c.scores[a] for a in operands])
    return c.scores[x]


def surrounds_scores(x: Expr) -> bool:
    return x.op in ("cast", "where") or (x.op == "add" and not any(a.op in NUMBERS for a in x.args))


def in_own_region(c: Builder, x: Expr, operands: list[Expr]) -> Expr:
    """x with scaled operands, or scaled itself, in the grad mode and autocast of x and held by the
    nodes of x.
    """
    state, c.state = c.state, x.state
    try:
        if not operands:
            found = capped(c, x) or with_scale(c, x)
        elif all(a is b for a, b in zip(operands, x.args, strict=True)):
            return x
        else:
            found = c.make(x.op, operands, x.attr, x.shape)
    finally:
        c.state = state
    if found is not x and found.graph_value is None:
        found.graph_value = x
    return found


def capped(c: Builder, x: Expr) -> Expr | None:
    """cap · tanh(scale · q kᵀ / cap), whatever of scale / cap was multiplied together: cap · tanh(t
    · q kᵀ) has the scale cap · t. A template's numbers have no value: there the very cap divides.
    """
    cap, bent = number_and_rest(x) if x.op == "mul" else (c.const(1.0), x)
    if cap is None or peel(bent).op != "tanh":
        return None
    inner = peel(peel(bent).args[0])
    if not is_const(cap):
        if inner.op != "div" or inner.args[1] is not cap:
            return None
        inner = inner.args[0]
    scores = peel(with_scale(c, inner))
    t, product = number_and_rest(scores) if scores.op == "mul" else (None, None)
    if t is None or product.op != "matmul":
        return None
    if is_const(cap):
        if not is_const(t) or not cap.attr:
            return None
        scores = c.make("mul", (product, c.const(t.attr * cap.attr)), None, product.shape)
        cap = c.const(abs(cap.attr))  # tanh is odd
    return c.make("soft_cap", (scores, cap), None, x.shape)


def with_scale(c: Builder, x: Expr) -> Expr:
    product, numbers = without_factors(c, of_scaled_query(c, x))
    if product.op != "matmul":
        return x
    q, by_q = without_factors(c, product.args[0])
    k, by_k = without_factors(c, product.args[1])
    numbers += by_q + by_k
    if len(numbers) > 1 and not all(isinstance(f, float) for f in numbers):
        return x
    scale = (
        math.prod(numbers, start=1.0) if all(isinstance(f, float) for f in numbers) else numbers[0]
    )
    product = c.make("matmul", (q, k), None, product.shape)
    return c.make(
        "mul", (product, c.const(scale) if isinstance(scale, float) else scale), None, product.shape
    )


def of_scaled_query(c: Builder, x: Expr) -> Expr:
    """(q kᵀ) s as (q s) kᵀ if the number s is known only at run time: no kernel takes such a scale,
    and making it constant would need a guard. With dynamic=True every float that a module holds is
    such a number.
    """
    for scores, number in (
        (x.args, x.args[::-1])[: 2 if x.op == "mul" else 1] if x.op in ("mul", "div") else ()
    ):
        product, factors = without_factors(c, scores)
        product = peel(product)
        if (
            number.of_run_time
            and product.op == "matmul"
            and all(isinstance(f, float) for f in factors)
        ):
            q, k = product.args
            q = c.make(x.op, (q, number), None, q.shape)
            product = c.make("matmul", (q, k), None, product.shape)
            return c.make(
                "mul", (product, c.const(math.prod(factors, start=1.0))), None, product.shape
            )
    return x


def without_factors(c: Builder, e: Expr) -> tuple[Expr, list[float | Expr]]:
    """A value and the numbers that multiply it, the outermost first; captured scalars
    as they are.
    """
    numbers: list[float | Expr] = []
    # the factor; the permutations passed, and how many of them are around it
    rest, permutes, inside = e, [], 0
    for _ in range(LOOKED_THROUGH):
        if e.op in ("cast", "permute"):
            permutes += [e] if e.op == "permute" else []
            e = e.args[0]
            continue
        e, number = without_factor(e)
        if number is None:
            break
        numbers.append(number)
        rest, inside = e, len(permutes)
    for p in reversed(permutes[:inside]):
        rest = c.make("permute", (rest,), p.attr, p.shape)
    return rest, numbers


def without_factor(e: Expr) -> tuple[Expr, float | Expr | None]:
    """A value and the number that multiplies it, if one does."""
    if e.op == "div" and is_const(e.args[1]) and e.args[1].attr:
        return e.args[0], 1.0 / e.args[1].attr
    number, rest = number_and_rest(e) if e.op == "mul" else (None, None)
    if number is None or number.op == "sym":
        return e, None
    return rest, number.attr if is_const(number) else number


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
