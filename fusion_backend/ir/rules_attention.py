"""Canonical forms of attention, rotary embeddings, reshapes and losses. Continues composites.py, in
the same terms.
"""

from __future__ import annotations

import math

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.ir.expr import Expr, is_const, peel
from fusion_backend.ir.rules_norm import LOOKED_THROUGH, NUMBERS, number_and_rest, where

# softmax(scale · q kᵀ + mask) v. The scale, wherever it was multiplied, stands on the scores, even
# if it is 1. Scores that are capped, cap · tanh(scores / cap), are one operator around them.


def softmax(c, a, s):
    x, val = a("self"), a.node.args[0].meta["val"]
    if a.get("dtype") is not None:
        x = c.cast(x, val.dtype, a.get("dtype"), s)
    return softmax_of(c, x, a.get("dim") % len(s) - len(s), s) if s else None


def softmax_of(c, x: Expr, axis: int, s) -> Expr:
    return c.make("softmax", (scaled(c, x) if axis == -1 else x,), axis, s)


def as_softmax(c, x: Expr, y: Expr, s) -> Expr | None:
    """exp(z) / sum(exp(z)), where z has its largest value subtracted."""
    if x.op != "exp" or y.op != "sum" or y.args[0] is not x or len(y.attr) != 1:
        return None
    z = x.args[0]
    for inner, shift in (z.args, z.args[::-1]) if z.op == "add" else ():
        minus, largest = number_and_rest(shift) if shift.op == "mul" else (None, None)
        if minus is not None and is_const(minus) and minus.attr == -1.0 and largest.op == "amax":
            if largest.args[0] is inner and largest.attr == y.attr:
                return softmax_of(c, inner, y.attr[0], s)
    return None


def scaled(c, x: Expr) -> Expr:
    """Scores with one explicit scale, capped perhaps; anything else as it is. A masking around the
    scores stays.

    Sums may be as many as the graph is deep, and may read one another: each is visited once, and
    none by recursion.
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


def in_own_region(c, x: Expr, operands: list[Expr]) -> Expr:
    """x of scaled operands, or scaled itself: of the grad mode and autocast of x, and held by the
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
    if found is not x and found.written is None:
        found.written = x
    return found


def capped(c, x: Expr) -> Expr | None:
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


def with_scale(c, x: Expr) -> Expr:
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


def of_scaled_query(c, x: Expr) -> Expr:
    """(q kᵀ) s as (q s) kᵀ, where only a run knows the number s: no kernel takes such a scale, and
    to make it constant would take a guard. With dynamic=True every float that a module holds is
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


def without_factors(c, e: Expr) -> tuple[Expr, list[float | Expr]]:
    """A value and the numbers that multiply it, the outermost first; captured scalars
    as they are.
    """
    numbers: list[float | Expr] = []
    # what is multiplied; the permutations passed, and how many of them are around it
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


def repeated(c, x: Expr, times, s) -> Expr:
    """Heads repeated for grouped queries: [..., h, n, d] to [..., h · times, n, d]."""
    return c.make("repeat_heads", (x,), str(times), s)


def repeat_interleaved(c, a, s):
    x, times = a("self"), a.get("repeats")
    heads = (
        isinstance(times, int) and a.get("dim") is not None and a.get("dim") % len(s) == len(s) - 3
    )
    return repeated(c, x, times, s) if heads else None


def attention(c, a, s):
    q, k, v, mask = (a(name) for name in ("query", "key", "value", "attn_mask"))
    if None in (q.shape, k.shape, v.shape) or not (
        isinstance(q.shape[-1], int) or a.get("scale") is not None
    ):
        return None
    if a.get("enable_gqa", False):
        heads = q.shape[-3]
        k, v = (
            x
            if same(x.shape[-3:-2], (heads,))
            else repeated(c, x, heads // x.shape[-3], (*x.shape[:-3], heads, *x.shape[-2:]))
            for x in (k, v)
        )
    scale = 1 / math.sqrt(q.shape[-1]) if a.get("scale") is None else a.get("scale")
    shape = (*s[:-1], k.shape[-2])
    scores = c.make(
        "matmul",
        (q, c.transpose(k, -2, -1, (*k.shape[:-2], k.shape[-1], k.shape[-2]))),
        None,
        shape,
    )
    scores = c.make("mul", (scores, c.const(scale)), None, shape)
    boolean = mask is not None and a.get("attn_mask").dtype == torch.bool
    if boolean:
        scores = where(c, mask, scores, c.const(-math.inf), shape)
    elif mask is not None:
        scores = c.add(scores, mask, shape)
    if a.get("is_causal", False):
        scores = c.make("causal", (scores,), None, shape)
    # a row of which everything is masked is 0 here, NaN by hand
    p = c.make("masked_softmax" if boolean else "softmax", (scores,), -1, shape)
    if a.get("dropout_p", 0.0):
        p = c.make("dropout", (p, c.const(a.get("dropout_p"))), a.node.name, shape)
    return c.make("matmul", (p, v), None, s)


def einsum(c, a, s):
    """Products over one index of two operands, with any batch: bhqd,bhkd->bhqk is a
    matrix product.
    """
    equation, nodes = a.get("equation").replace(" ", ""), a.values["tensors"]
    if (
        len(nodes) != 2
        or not equation.replace(",", "").replace("->", "").isalpha()
        or "->" not in equation
    ):
        return None
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    batch = [i for i in out if i in left and i in right]
    rows, columns = ([i for i in out if i in x and i not in batch] for x in (left, right))
    summed = [i for i in left if i in right and i not in out]
    if not len(rows) == len(columns) == len(summed) == 1 or {*left, *right} != {*out, *summed}:
        return None
    if len({*left}) < len(left) or len({*right}) < len(right):
        return None
    x, y = (c.of[n] for n in nodes)
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))

    def ordered(e: Expr, have: str | list, want: list) -> Expr:
        return c.permute(e, [have.index(i) for i in want], tuple(sizes[i] for i in want))

    x, y = ordered(x, left, batch + rows + summed), ordered(y, right, batch + summed + columns)
    product = c.make("matmul", (x, y), None, tuple(sizes[i] for i in batch + rows + columns))
    return ordered(product, batch + rows + columns, list(out))


# Reshapes that are something else: rows of a tensor, repeated heads, interleaved halves.


def viewed(c, a, s):
    x = a("self")
    while x.op in ("view", "rows"):  # a view of a view
        x = x.args[0]
    if same(x.shape, s):
        return x
    if x.shape is None or not s:
        return c.make("view", (x,), str(s), s)
    return (
        behind_product(c, x, s)
        or as_repeated(c, x, s)
        or as_interleaved(c, x, s)
        or reshaped(c, x, s)
    )


def reshaped(c, x: Expr, s) -> Expr:
    if len(s) == 2 and same(x.shape[-1:], s[-1:]):
        return c.make("rows", (x,), None, s)
    return c.make("view", (x,), str(s), s)


def of_rows(c, x: Expr) -> Expr:
    """What was flattened to rows; a cast of the rows, as autocast makes, is a cast of it."""
    passed = []
    while x.peeled.op == "rows" and (x, c.state) not in c.flattened:
        passed.append(x)
        x = x.args[0]
    inner = c.flattened.get((x, c.state), x)
    for e in reversed(passed):
        if e.op == "cast":
            inner = c.make("cast", (inner,), e.attr, inner.shape)
            inner.rows = e
        c.flattened[e, c.state] = inner
    return inner


def behind_product(c, x: Expr, s) -> Expr | None:
    """x seen as rows, times a weight (plus a bias, or several), seen as x again: the product of x
    itself.
    """
    biases = []
    while x.op == "add" and len(biases) < LOOKED_THROUGH:
        x, b = next(
            (
                (y, b)
                for y, b in (x.args, x.args[::-1])
                if b.shape is not None and len(b.shape) == 1
            ),
            (x, None),
        )
        if b is None:
            return None
        biases.append(b)
    if x.op != "matmul" or not same(x.shape[-1:], s[-1:]):
        return None
    inner = of_rows(c, x.args[0])
    if inner.shape is None or not same(inner.shape[:-1], s[:-1]):
        return None
    product = c.make("matmul", (inner, x.args[1]), None, s)
    for b in reversed(biases):
        product = c.add(product, b, s)
    return product


def as_repeated(c, x: Expr, s) -> Expr | None:
    """x[:, :, None].expand(b, h, times, n, d).reshape(b, h · times, n, d)"""
    if (
        x.op != "expand"
        or x.args[0].op != "unsqueeze"
        or x.args[0].attr != -3
        or len(s) != len(x.shape) - 1
    ):
        return None
    inner = x.args[0].args[0]
    kept = (*inner.shape[:-3], *inner.shape[-2:])
    return repeated(c, inner, x.shape[-3], s) if same(kept, (*s[:-3], *s[-2:])) else None


def as_interleaved(c, x: Expr, s) -> Expr | None:
    """stack((a, b), -1).flatten(-2): a and b in turn."""
    if x.op != "stack" or x.attr != -1 or len(x.args) != 2 or not same(x.shape[:-2], s[:-1]):
        return None
    return c.make("interleave", x.args, None, s)


def joined(c, a, s, op: str):
    nodes, axis = a.values["tensors"], a.get("dim", 0) % len(s) - len(s)
    if not isinstance(nodes, (list, tuple)):
        return None
    parts = [c.of[n] for n in nodes]
    if op == "cat" and all(p.op == "unsqueeze" and p.attr == axis for p in parts):
        return c.make("stack", (p.args[0] for p in parts), axis, s)
    return c.make(op, parts, axis, s)


def is_pairs(x: Expr) -> bool:
    """Is it a tensor seen as pairs of neighbours, [..., n, 2]?"""
    inner = x.args[0].shape if x.op == "view" else None
    return inner is not None and same(x.shape[:-2], inner[:-1]) and same(x.shape[-1:], (2,))


def selected(c, a, s):
    """x[:, None][:, 0] is x; of pairs it is every other element."""
    x, dim, index = a("self"), a.get("dim"), a.get("index")
    if not x.shape or not isinstance(index, int):
        return None
    axis = dim % len(x.shape) - len(x.shape)
    if x.op == "unsqueeze" and x.attr == axis:
        return x.args[0]
    every_other = axis == -1 and is_pairs(x)
    return c.make("every_other", x.args, (-1, index % 2), s) if every_other else None


def unbound(c, a, s):
    x, dim = a("self"), a.get("dim", 0)
    if not x.shape or dim % len(x.shape) != len(x.shape) - 1 or not is_pairs(x):
        return None
    shape = tuple(a.node.meta["val"][0].shape)
    return c.make("tuple", [c.make("every_other", x.args, (-1, k), shape) for k in (0, 1)])


# Losses over rows of logits [..., v] and flattened targets.

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def cross_entropy(c, a, s, logits: Expr | None = None):
    val, target = a.node.args[0].meta["val"], a.get("target")
    if val.dim() != 2 or target.dtype != torch.int64 or a.get("weight") is not None:
        return None
    numbers = [c.const(a.get("ignore_index", -100)), c.const(a.get("label_smoothing", 0.0))]
    logits = of_rows(c, logits or a("self"))
    return c.make(
        "cross_entropy", (logits, a("target"), *numbers), REDUCTIONS[a.get("reduction", 1)], s
    )


def log_softmax(c, a, s):
    x, val = a("self"), a.node.args[0].meta["val"]
    if a.get("dtype") is not None:
        x = c.cast(x, val.dtype, a.get("dtype"), s)
    return c.make("log_softmax", (x,), a.get("dim") % len(s) - len(s), s) if s else None


def negative_log_likelihood(c, a, s):
    x = a("self")
    return cross_entropy(c, a, s, x.args[0]) if x.op == "log_softmax" and x.attr == -1 else None


RULES = {
    "aten::softmax": softmax,
    "aten::log_softmax": log_softmax,
    "aten::scaled_dot_product_attention": attention,
    "aten::einsum": einsum,
    "aten::repeat_interleave": lambda c, a, s: (
        repeat_interleaved(c, a, s) if s and "repeats" in a.values else None
    ),
    "aten::view": viewed,
    "aten::reshape": viewed,
    "aten::_unsafe_view": viewed,
    "aten::flatten": viewed,
    "aten::unflatten": viewed,
    "aten::view_as": viewed,
    "aten::reshape_as": viewed,
    "aten::select": selected,
    "aten::unbind": unbound,
    "aten::cat": lambda c, a, s: joined(c, a, s, "cat"),
    "aten::stack": lambda c, a, s: joined(c, a, s, "stack"),
    "aten::cross_entropy_loss": cross_entropy,
    "aten::nll_loss_nd": negative_log_likelihood,
    "aten::nll_loss": negative_log_likelihood,
}
