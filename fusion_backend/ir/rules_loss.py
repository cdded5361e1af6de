"""Rules of losses over rows of logits `[..., v]` and over channels `[n, c, ...]`, and of the
log-probabilities of given tokens.
"""

from __future__ import annotations

import torch

from fusion_backend.capture.sizes import equals, same
from fusion_backend.ir.builder import Builder, from_right
from fusion_backend.ir.expr import LOOKED_THROUGH, Expr, is_const, peel
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.rules_shape import of_rows, over_channels, undetached
from fusion_backend.ir.schema_args import Call

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def loss(
    c: Builder, call: Call, logits: Expr, target: Expr, weight: Expr | None, ignore_index, smoothing
):
    if call["target"].dtype != torch.int64:
        return None
    numbers = (c.const(ignore_index), c.const(smoothing))
    reduction, rank = REDUCTIONS[call["reduction"]], call["self"].dim()
    # class weights never have a gradient, detached or not
    weights = () if weight is None else (undetached(weight),)
    if rank == 2:
        operands = (of_rows(c, logits), target, *weights, *numbers)
        return c.make("cross_entropy", operands, reduction, call.shape)
    if rank > 2:
        operands = (logits, target, *weights, *numbers)
        return c.make("channel_cross_entropy", operands, reduction, call.shape)
    return None


@rule("aten::cross_entropy_loss")
def cross_entropy(
    c: Builder, call: Call, self: Expr, target: Expr, weight: Expr | None, ignore_index: int,
    label_smoothing: float,
):  # fmt: skip
    return loss(c, call, self, target, weight, ignore_index, label_smoothing)


@rule("aten::nll_loss", "aten::nll_loss_nd")
def negative_log_likelihood(
    c: Builder, call: Call, self: Expr, target: Expr, weight: Expr | None, ignore_index: int
):
    """Of log-probabilities that may be cast: autocast of CPU casts them to fp32, and not what they
    are made of.
    """
    self = peel(self)
    rank = call["self"].dim()
    if axis_of_log_softmax(self) != (-1 if rank == 2 else 1 - rank):
        return None
    return loss(c, call, self.args[0], target, weight, ignore_index, 0.0)


@rule("aten::log_softmax")
def log_softmax(c: Builder, call: Call, self: Expr, dim: int, dtype: torch.dtype | None):
    if not call.shape:  # of a single number
        return None
    if dtype is not None:
        self = c.cast(self, call["self"].dtype, dtype, call.shape)
    rank = len(call.shape)
    axis = dim % rank - rank
    if over_channels(axis, call.shape):
        return c.make("channel_softmax", (self,), "log_softmax", call.shape)
    return c.make("log_softmax", (self,), axis, call.shape)


@composite("add")
def log_softmax_by_difference(c: Builder, x: Expr, y: Expr, shape):
    """x - logsumexp(x) over channels."""
    if shape is None or len(shape) < 3:
        return None
    axis = 1 - len(shape)
    for value, minus in ((x, y), (y, x)):
        if not is_negation(minus):
            continue
        total = next(a for a in minus.args if not is_const(a))
        keeps = not (total.op == "unsqueeze" and total.attr == axis)
        total = total if keeps else total.args[0]
        if (total.op, total.attr) == ("logsumexp", ((axis,), keeps)) and total.args[0] is value:
            return c.make("channel_softmax", (value,), "difference", shape)
    return None


def axis_of_log_softmax(e: Expr) -> int | None:
    """Counted from the right; None of anything else."""
    if (e.op, e.attr) == ("channel_softmax", "log_softmax"):
        return 1 - len(e.shape)
    return e.attr if e.op == "log_softmax" else None


# Log-probabilities of given tokens, log_softmax(x)[i], as x[i] - log Σ e^x.


@rule("aten::logsumexp")
def logsumexp(c: Builder, call: Call, self: Expr, dim: list[int], keepdim: bool):
    """A logsumexp that drops its dimension is an operator of its own, and no squeeze, which would
    count as free to compute again.
    """
    if not self.shape:
        return None
    return c.make("logsumexp", (self,), (from_right(dim, len(self.shape)), keepdim), call.shape)


@rule("aten::gather")
def gather(c: Builder, call: Call, self: Expr, dim: int, index: Expr, sparse_grad: bool):
    return None if sparse_grad else taken(c, call.shape, "gather", self, dim, index)


@rule("aten::take_along_dim")
def take_along_dim(c: Builder, call: Call, self: Expr, dim: int | None, indices: Expr):
    return None if dim is None else taken(c, call.shape, "take_along_dim", self, dim, indices)


@rule("aten::index")
def indexed(c: Builder, call: Call, self: Expr, indices: list[Expr]):
    """x[arange(b)[:, None], arange(s), i]: the element of each row that i names."""
    *rows, index = indices
    last, batch = call["indices"][-1], range(1 - len(self.shape), 0)
    if last.dtype != torch.int64 or len(indices) != len(self.shape):
        return None
    if not same(index.shape, self.shape[:-1]) or not same(index.shape, call.shape):
        return None
    if not all(counts(e, axis, call.shape[axis]) for e, axis in zip(rows, batch, strict=True)):
        return None
    shape, held = (*call.shape, 1), index.op == "squeeze" and index.attr == (-1,)
    column = index.args[0] if held else c.make("unsqueeze", (index,), -1, shape)
    found = taken(c, shape, "index", self, -1, column)
    return c.make("squeeze", (found,), (-1,), call.shape)


def counts(e: Expr, axis: int, size) -> bool:
    """Is it 0, 1, ... along one dimension of `size`, and constant along all others?"""
    shown = e.args[0] if e.op == "expand" else e
    e = shown
    for _ in range(LOOKED_THROUGH):
        e = e.args[0] if e.op in ("unsqueeze", "squeeze", "view", "rows") else e
    if e.op != "arange" or e.attr[:2] != (0, 1):
        return False
    return same(shown.shape, (*(1,) * (len(shown.shape) + axis), size, *(1,) * (-axis - 1)))


TAKES = ("gather", "take_along_dim", "index")


def taken(c: Builder, shape, op: str, x: Expr, dim: int, index: Expr) -> Expr | None:
    """Elements of x by an index, in a result of that shape; of log-probabilities as a
    difference.
    """
    rank = len(shape)
    if not rank or None in (x.shape, index.shape):
        return None
    axis = dim % rank - rank
    alike = same(without(x.shape, axis), without(index.shape, axis))
    attr = f"dimension {axis}, {how_many(index.shape[axis], alike)}"
    logits, total, passed = normalised(c, x, axis, alike)
    if axis == -1:  # the rows may be those of a tensor that was flattened; the index says so
        logits = of_rows(c, logits)
    column = c.make(op, (logits, index), attr, shape)
    if total is None:
        return column
    name, where = total
    minus = c.neg(c.make(name, (logits,), where, shape), shape)
    return rewrapped(c, c.add(column, minus, shape), passed)


def without(shape, axis: int) -> tuple:
    return tuple(size for i, size in enumerate(shape) if i - len(shape) != axis)


def how_many(elements, alike: bool) -> str:
    if not alike:
        return "an index that may have another shape"
    return "one element a row" if equals(elements, 1) else f"{elements} elements a row"


def normalised(c: Builder, x: Expr, axis: int, alike: bool) -> tuple:
    """For log-probabilities: the logits, the operator and attribute that stand for the logarithm of
    their sum, and the casts around them. For anything else (x, None, []).

    With an infinite logit log_softmax is NaN, and a difference with logsumexp is not.
    """
    inner, passed, dropped = unwrapped(of_rows(c, x) if axis == -1 else x)
    if dropped or negations(passed):
        return x, None, []
    over = axis_of_log_softmax(inner)
    if over is not None and {e.state for e in (inner, *passed)} == {c.state}:
        along = "" if over == axis else f", taken along dimension {axis}"
        where = f"dimension {over}{along}"
        return inner.args[0], ("logsumexp of log_softmax", where), passed
    for y, minus in (inner.args, inner.args[::-1]) if inner.op == "add" and alike else ():
        total, steps, dropped = unwrapped(minus)
        of_y = total.op == "logsumexp" and total.args[0].peeled is y.peeled
        states = {e.state for e in (inner, total, *steps)}
        if of_y and total.attr[0] == (axis,) and negations(steps) == 1 and not dropped:
            if states == {c.state}:
                return y, ("logsumexp of x", f"dimension {axis}"), passed
    return x, None, []


def unwrapped(e: Expr) -> tuple[Expr, list[Expr], int]:
    """The value without casts and negations, these steps, and how many dimensions of size 1 it has
    lost at its end.
    """
    steps, dropped = [], 0
    for _ in range(LOOKED_THROUGH):
        if e.op == "cast" or is_negation(e):
            steps.append(e)
            e = e.args[0] if not is_const(e.args[0]) else e.args[1]
        elif drops_column(e):
            dropped, e = dropped + 1, e.args[0]
        elif e.op == "unsqueeze" and e.attr == -1:
            dropped, e = dropped - 1, e.args[0]
        else:
            break
    return e, steps, dropped + (e.op == "logsumexp" and not e.attr[1])


def is_negation(e: Expr) -> bool:
    return e.op == "mul" and any(is_const(a) and a.attr == -1.0 for a in e.args)


def negations(steps: list[Expr]) -> int:
    return sum(e.op == "mul" for e in steps)


def drops_column(e: Expr) -> bool:
    if e.op == "squeeze":
        return e.attr == (-1,)
    return e.op == "view" and None not in (e.shape, e.args[0].shape) and is_column(e.args[0], e)


def is_column(x: Expr, e: Expr) -> bool:
    return same(x.shape, (*e.shape, 1))


def rewrapped(c: Builder, e: Expr, steps: list[Expr]) -> Expr:
    """The casts and negations again, around another value."""
    for step in reversed(steps):
        if step.op == "cast":
            e = c.make("cast", (e,), step.attr, e.shape)
        else:
            e = c.neg(e, e.shape)
    return e


@composite("add")
def difference_with_logsumexp(c: Builder, x: Expr, y: Expr, shape):
    """x[i] - logsumexp(x), or logsumexp(x) - x[i], with the column of the index or without."""
    for one, other in ((x, y), (y, x)):
        column, casts, dropped = unwrapped(one)
        total, steps, too = unwrapped(other)
        if column.op not in TAKES or total.op != "logsumexp" or dropped != too:
            continue
        axis, states = total.attr[0], {e.state for e in (column, *casts, total, *steps)}
        logits = of_rows(c, total.args[0]) if axis == (-1,) else total.args[0]
        if logits.peeled is not column.args[0].peeled or states != {c.state}:
            continue
        where = f"dimension {axis[0]}"
        alike = column.attr.startswith(f"{where}, ") and "may have another shape" not in column.attr
        if len(axis) > 1 or not alike or {negations(casts), negations(steps)} != {0, 1}:
            continue
        if dropped not in (0, 1) or (dropped and axis != (-1,)):
            continue
        total = c.make("logsumexp of x", (logits,), where, column.shape)
        operands = rewrapped(c, column, casts), rewrapped(c, total, steps)
        found = c.make("add", operands, None, column.shape)
        return c.make("squeeze", (found,), (-1,), shape) if dropped else found
    return None


@rule("aten::select", "aten::squeeze")
def column_dropped(c: Builder, call: Call, self: Expr):
    """The only element of each row: x[..., 0], and squeeze without a dimension."""
    inner, *_ = unwrapped(self)
    if inner.op not in (*TAKES, "logsumexp") or self.shape is None:
        return None
    return c.make("squeeze", (self,), (-1,), call.shape) if is_column(self, call) else None
