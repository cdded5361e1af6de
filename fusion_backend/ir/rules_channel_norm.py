"""Layer and RMS normalisation over the channels of channels-first tensors, written by hand, and
their unit length.

The mean is taken over dimension 1 of `[n, c, ...]`, of which there are three dimensions at least.
A composite and no spelling of a pattern, because dimension 1 is not counted from the right: one
operator `channel_norm` stands for tensors of any number of dimensions. Its operands are x, eps, and
what the attribute says: layer, rms or length, then whether there are a scale (of length alone), a
weight and a bias.
"""

from __future__ import annotations

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import NUMBERS, Expr, number_and_rest, peel
from fusion_backend.ir.rules import composite


@composite("mul")
def channel_norm_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """(x - mean) · rsqrt(var + eps), or x · rsqrt(mean(x²) + eps)."""
    return normalised(c, x, y, "rsqrt", shape) or normalised(c, y, x, "rsqrt", shape)


@composite("div")
def quotient_channel_norm(c: Builder, x: Expr, y: Expr, shape):
    """(x - mean) / √(var + eps), or x / √(mean(x²) + eps)."""
    return normalised(c, x, y, "sqrt", shape)


def normalised(c: Builder, value: Expr, factor: Expr, root: str, shape) -> Expr | None:
    """value times or divided by root(mean(value²) + eps), the mean over dimension 1."""
    factor = peel(factor)
    if factor.op != root or shape is None or len(shape) < 3 or not same(value.shape, shape):
        return None
    total = peel(factor.args[0])
    eps, spread = number_and_rest(total) if total.op == "add" else (None, None)
    if spread is None:
        return None
    over = (1 - len(shape),)
    if not is_reduced_square(spread, "mean", over, value):
        return None
    x = centred(peel(value), over)
    kind, x = ("rms", value) if x is None else ("layer", x)
    return c.make("channel_norm", (x, eps), (kind, False, False, False), shape)


def is_reduced_square(e: Expr, reduction: str, over: tuple[int, ...], x: Expr) -> bool:
    """Is e the mean or the sum of x² over these dimensions?"""
    e = peel(e)
    square = peel(e.args[0]) if (e.op, e.attr) == (reduction, over) else None
    return (
        square is not None and square.op == "mul" and all(peel(a) is peel(x) for a in square.args)
    )


def centred(e: Expr, over: tuple[int, ...]) -> Expr | None:
    """x, where e is x - mean(x)."""
    for x, minus in (e.args, e.args[::-1]) if e.op == "add" else ():
        minus = peel(minus)
        number, mean = number_and_rest(minus) if minus.op == "mul" else (None, None)
        if number is None or number.op != "const" or number.attr != -1.0:
            continue
        mean = peel(mean)
        if (mean.op, mean.attr) == ("mean", over) and peel(mean.args[0]) is peel(x):
            return x
    return None


@composite("div")
def unit_channels(c: Builder, x: Expr, y: Expr, shape):
    """x / max(‖x‖, eps), the length of all channels of a position."""
    y = peel(y)
    if y.op != "maximum" or shape is None or len(shape) < 3 or not same(x.shape, shape):
        return None
    for root, eps in (y.args, y.args[::-1]):
        root = peel(root)
        if root.op != "sqrt" or eps.op not in NUMBERS:
            continue
        if is_reduced_square(root.args[0], "sum", (1 - len(shape),), x):
            return c.make("channel_norm", (x, eps), ("length", False, False, False), shape)
    return None


@composite("mul")
def scale_of_unit_channels(c: Builder, x: Expr, y: Expr, shape):
    """Unit length times a number, often √c."""
    for norm, number in ((peel(x), y), (peel(y), x)):
        if norm.op == "channel_norm" and norm.attr[0] == "length" and number.op in NUMBERS:
            return with_operand(c, norm, number, shape, 1)
    return None


@composite("mul")
def weight_of_channel_norm(c: Builder, x: Expr, y: Expr, shape):
    """A norm over channels times its weight."""
    return with_vector(c, x, y, shape, 2) or with_vector(c, y, x, shape, 2)


@composite("add")
def bias_of_channel_norm(c: Builder, x: Expr, y: Expr, shape):
    """A norm over channels plus its bias."""
    return with_vector(c, x, y, shape, 3) or with_vector(c, y, x, shape, 3)


def with_vector(c: Builder, norm: Expr, value: Expr, shape, part: int) -> Expr | None:
    """The norm with its weight (part 2) or bias (part 3), one element for each channel."""
    norm = peel(norm)
    if norm.op != "channel_norm" or not per_channel(value, shape):
        return None
    return with_operand(c, norm, value, shape, part)


def with_operand(c: Builder, norm: Expr, value: Expr, shape, part: int) -> Expr | None:
    """The norm with one operand more, where it has neither that nor a bias. A scale may come behind
    the weight.
    """
    if norm.attr[part] or norm.attr[3] or not same(norm.shape, shape):
        return None
    x, eps, *rest = norm.args
    before = sum(norm.attr[1:part])
    form = (*norm.attr[:part], True, *norm.attr[part + 1 :])
    return c.make("channel_norm", (x, eps, *rest[:before], value, *rest[before:]), form, shape)


def per_channel(e: Expr, shape) -> bool:
    """Does e broadcast to `shape` with one element for each channel?"""
    rank = len(shape)
    if e.shape is None or not rank - 1 <= len(e.shape) <= rank:
        return False
    return same(e.shape, (*(1,) * (len(e.shape) - rank + 1), shape[1], *(1,) * (rank - 2)))
