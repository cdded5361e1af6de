"""Brings attention scores to one form: scale · q kᵀ, and what is around them.

The scale is moved to the scores, wherever the graph multiplies by it, and is explicit even if it is
1. Capped scores, cap · tanh(scores / cap), are one operator around the scores. A softmax over the
scores and a sink, whose weight nobody reads, is an operator of both.
"""

from __future__ import annotations

import math

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, NUMBERS, Expr, is_const, number_and_rest, peel
from fusion_backend.ir.heads import (
    AROUND,
    SOFTMAX,
    holds_product,
    made_as,
    operand,
    splits,
    weights_times_values,
)


def scaled(c: Builder, x: Expr) -> Expr:
    """Scores, which may be capped, with one explicit scale; any other value unchanged. A masking
    around the scores stays.

    There may be as many sums as the graph is deep, and they may read one another: each is visited
    once, without recursion.
    """
    pending, others = [x], {}
    while pending:
        e = pending.pop()
        if e not in others:
            others[e] = one_by_one(c, e) or split(c, e)
        other = others[e]
        operands = (other,) if other else e.args if surrounds_scores(e) else ()
        waiting = [a for a in operands if a not in c.scores]
        if waiting:
            pending += [e, *waiting]
        elif e not in c.scores and other:
            c.scores[e] = standing_for(e, c.scores[other])
        elif e not in c.scores:
            c.scores[e] = in_own_region(c, e, [c.scores[a] for a in operands])
    return c.scores[x]


def standing_for(x: Expr, found: Expr) -> Expr:
    """`found`, which names x as what it is in the graph."""
    if found is not x and found.graph_value is None:
        found.graph_value = x
    return found


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
    return standing_for(x, found)


def one_by_one(c: Builder, x: Expr) -> Expr | None:
    """c · where(m, a, fill) as where(m, c · a, c · fill), and so for a quotient, where a is scores.
    The number is what eager computes, in the dtype of the graph.
    """
    inner, number = (x.args if x.op == "div" else number_and_rest(x)[::-1]) or (None, None)
    if number is None or not is_const(number) or not number.attr or not x.nodes:
        return None
    inner = peel(inner)
    fills = [a for a in inner.args[1:] if is_const(a)] if inner.op == "where" else []
    if len(fills) != 1 or not holds_product(inner):
        return None
    fill = torch.tensor(fills[0].attr, dtype=x.nodes[0].meta["val"].dtype)
    fill = c.const((fill / number.attr if x.op == "div" else fill * number.attr).item())
    keep, *sides = inner.args
    sides = [
        fill if a is fills[0] else made_as(c, x, x.op, (a, number), None, a.shape) for a in sides
    ]
    return made_as(c, x, "where", (keep, *sides), None, x.shape)


def split(c: Builder, x: Expr) -> Expr | None:
    """Scores of all heads in one dimension, seen with a dimension for the heads."""
    if x.op != "view" or not splits(x.args[0].shape, x.shape) or not holds_product(x.args[0]):
        return None
    return with_heads(c, x.args[0], x.shape[:2])


def with_heads(c: Builder, e: Expr, lead: tuple, depth: int = LOOKED_THROUGH) -> Expr:
    """Scores, weights or their product with the values, [b · h, n, m], as [b, h, n, m]. lead: b and
    h. What broadcasts over the batch stays.
    """
    if e.shape is None or len(e.shape) < 3 or same(e.shape[:1], (1,)):
        return e
    alike = e.op in AROUND or (e.op in SOFTMAX and e.attr in (-1, -2))
    if not depth or not (alike or e.op == "matmul") or not holds_product(e):
        return operand(c, e, lead)
    last = weights_times_values(e)
    parts = e.args[:1] if last else () if e.op == "matmul" else e.args
    args = [
        with_heads(c, a, lead, depth - 1) if a in parts else operand(c, a, lead) for a in e.args
    ]
    if e.op in SOFTMAX and e.attr == -1:  # the scores may have had heads before
        args = [scaled(c, args[0])]
    return made_as(c, e, e.op, args, e.attr, (*lead, *e.shape[1:]))


def without_sink(c: Builder, x: Expr, start, shape) -> Expr | None:
    """The weights of the scores in a softmax over them and one number more in each row, the
    attention sink, before or after them.
    """
    x = peel(x)
    if x.op != "softmax" or x.attr != -1 or not (start == 0 or start == 1):
        return None
    row = peel(x.args[0])
    if row.op != "cat" or row.attr != -1 or len(row.args) != 2:
        return None
    scores, sink = row.args if start == 0 else row.args[::-1]
    if None in (scores.shape, sink.shape) or not same(sink.shape[-1:], (1,)):
        return None
    if not same(scores.shape[-1:], shape[-1:]):
        return None
    sink = sink.args[0] if sink.op == "expand" else sink
    return c.make("sink_softmax", (scaled(c, scores), sink), -1, shape)


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
