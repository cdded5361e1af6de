"""Layer and RMS normalisation over the channels of channels-first tensors, written by hand.

The mean is taken over dimension 1 of `[n, c, ...]`, of which there are three dimensions at least.
A composite and no spelling of a pattern, because dimension 1 is not counted from the right: one
operator `channel_norm` stands for tensors of any number of dimensions. Its attribute says layer or
rms, whether there is a weight, and whether there is a bias.
"""

from __future__ import annotations

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, number_and_rest, peel
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
    spread, over = peel(spread), (1 - len(shape),)
    square = peel(spread.args[0]) if (spread.op, spread.attr) == ("mean", over) else spread
    if square.op != "mul" or any(peel(a) is not peel(value) for a in square.args):
        return None
    x = centred(peel(value), over)
    kind, x = ("rms", value) if x is None else ("layer", x)
    return c.make("channel_norm", (x, eps), (kind, False, False), shape)


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


@composite("mul")
def weight_of_channel_norm(c: Builder, x: Expr, y: Expr, shape):
    """A norm over channels times its weight."""
    return with_operand(c, x, y, shape, 1) or with_operand(c, y, x, shape, 1)


@composite("add")
def bias_of_channel_norm(c: Builder, x: Expr, y: Expr, shape):
    """A norm over channels plus its bias."""
    return with_operand(c, x, y, shape, 2) or with_operand(c, y, x, shape, 2)


def with_operand(c: Builder, norm: Expr, value: Expr, shape, part: int) -> Expr | None:
    """The norm with its weight (part 1) or its bias (part 2), where it has neither that nor what
    comes after it.
    """
    norm = peel(norm)
    if norm.op != "channel_norm" or any(norm.attr[part:]) or not same(norm.shape, shape):
        return None
    if not per_channel(value, shape):
        return None
    form = tuple(there or i == part for i, there in enumerate(norm.attr) if i)
    return c.make("channel_norm", (*norm.args, value), (norm.attr[0], *form), shape)


def per_channel(e: Expr, shape) -> bool:
    """Does e broadcast to `shape` with one element for each channel?"""
    rank = len(shape)
    if e.shape is None or not rank - 1 <= len(e.shape) <= rank:
        return False
    return same(e.shape, (*(1,) * (len(e.shape) - rank + 1), shape[1], *(1,) * (rank - 2)))
