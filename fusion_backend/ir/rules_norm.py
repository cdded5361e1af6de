"""Rules of reductions, and of layer and RMS norms, which are expressed by their reductions, so that
one written by hand is found too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion_backend.capture.sizes import equals
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, is_const
from fusion_backend.ir.operator_families import aten
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.schema_args import Call

Dims = int | Sequence[int] | None
# Reductions. They keep their dimensions; dropping them is a squeeze around it.


@rule(*aten("sum", "mean"))
def reduction(
    c: Builder,
    call: Call,
    self: Expr,
    dtype: torch.dtype | None,
    dim: Dims = None,
    keepdim: bool = False,
):
    return None if dtype is not None else c.reduce(call.name, self, dim, keepdim, call.shape)


@rule("aten::amax")
def amax(c: Builder, call: Call, self: Expr, dim: Dims, keepdim: bool):
    return c.reduce("amax", self, dim, keepdim, call.shape)


@rule("aten::max")
def largest(c: Builder, call: Call, self: Expr, dim: int, keepdim: bool):
    """max over one dimension gives values and indices."""
    values, indices = (tuple(v.shape) for v in call.value)
    where = c.make("argmax", (self,), (dim, keepdim), indices)
    return c.make("tuple", (c.reduce("amax", self, dim, keepdim, values), where))


def smallest(c: Builder, x: Expr, dims: Dims, keepdim: bool, shape) -> Expr:
    """min(x) as -max(-x), for floating-point x: the smallest integer has no negative."""
    most = c.reduce("amax", c.neg(x, x.shape), dims, keepdim, shape)
    return c.neg(most, shape)


@rule("aten::amin")
def amin(c: Builder, call: Call, self: Expr, dim: Dims, keepdim: bool):
    floating = call.value.dtype.is_floating_point
    return smallest(c, self, dim, keepdim, call.shape) if floating else None


@rule("aten::aminmax")
def aminmax(c: Builder, call: Call, self: Expr, dim: int | None, keepdim: bool):
    low, high = call.value
    if not low.dtype.is_floating_point:
        return None
    most = c.reduce("amax", self, dim, keepdim, tuple(high.shape))
    return c.make("tuple", (smallest(c, self, dim, keepdim, tuple(low.shape)), most))


@composite("maximum")
def largest_magnitude(c: Builder, x: Expr, y: Expr, shape):
    """max(-min(x), max(x)) is max(abs(x))."""
    for a, b in ((x, y), (y, x)):
        if a.op == b.op == "amax" and a.attr == b.attr:
            (of,), (negative,) = a.args, b.args
            twice = any(is_const(f) and f.attr < 0 for f in of.args)  # -(-x) is x, too
            if not twice and of.shape is not None and negative == c.neg(of, of.shape):
                magnitude = c.make("abs", (of,), None, of.shape)
                return c.make("amax", (magnitude,), a.attr, a.shape)
    return None


def variance(c: Builder, call: Call, x: Expr, shape) -> Expr:
    """`correction` in one overload, `unbiased` in the others; both are 1 unless given."""
    numbers = [v for v in (call["correction"], call["unbiased"]) if v is not None]
    correction = numbers[0] if numbers else 1
    correction = int(correction) if isinstance(correction, bool) else correction
    return c.variance(x, call["dim"], correction, bool(call["keepdim"]), shape)


@rule("aten::var")
def var(c: Builder, call: Call, self: Expr):
    return variance(c, call, self, call.shape)


@rule("aten::std")
def std(c: Builder, call: Call, self: Expr):
    return c.make("sqrt", (variance(c, call, self, call.shape),), None, call.shape)


def of_batch(x: Expr, call: Call) -> bool:
    """Are these the statistics of each channel, dimension 1, that batch norm computes? Then they
    are one operator whatever the rank, which dimensions that are counted from the right would show.
    """
    rank, dims = len(x.shape or ()), call["dim"]
    if rank < 2 or not dims or call["keepdim"]:
        return False
    uncorrected = call["correction"] == 0 or call["unbiased"] is False
    return uncorrected and sorted(d % rank for d in dims) == [0, *range(2, rank)]


@rule("aten::var_mean")
def var_mean(c: Builder, call: Call, self: Expr):
    shape = tuple(call.value[0].shape)
    if of_batch(self, call):
        both = (c.make(f"batch_{name}", (self,), None, shape) for name in ("var", "mean"))
        return c.make("tuple", tuple(both))
    mean = c.reduce("mean", self, call["dim"], bool(call["keepdim"]), shape)
    return c.make("tuple", (variance(c, call, self, shape), mean))


@composite("div")
def mean_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """A sum divided by the number of its terms."""
    total = x.args[0] if x.op == "squeeze" else x
    if total.op != "sum" or y.op not in ("const", "sym") or total.args[0].shape is None:
        return None
    count = math.prod(total.args[0].shape[d] for d in total.attr)
    if not (str(count) == y.attr if y.op == "sym" else statically_known_true(count == y.attr)):
        return None
    mean = c.make("mean", total.args, total.attr, total.shape)
    return c.make("squeeze", (mean,), x.attr, shape) if x.op == "squeeze" else mean


@rule(*aten("linalg_vector_norm", "linalg_norm"))
def vector_norm(
    c: Builder,
    call: Call,
    self: Expr,
    ord: int | float | str | None,
    dim: Dims,
    keepdim: bool,
    dtype: torch.dtype | None,
):
    if not (ord is None or equals(ord, 2)) or dtype is not None or dim is None:
        return None
    if call.name == "linalg_norm" and not isinstance(dim, int) and len(dim) > 1:  # of a matrix
        return None
    square = c.reduce("sum", c.mul(self, self, self.shape), dim, True, None)
    root = c.make("sqrt", (square,), None, square.shape)
    return root if keepdim else c.make("squeeze", (root,), square.attr, call.shape)


# Lengths with a lower bound: of a sum of squares s, √max(s, e) is max(√s, √e). A sum s + e is
# another value.


def bounded_length(c: Builder, x: Expr) -> Expr | None:
    """max(√s, √e), where x is max(s, e) of a sum of squares."""
    if x.op != "maximum":
        return None
    low, square = sorted(x.args, key=lambda a: a.op not in ("const", "scalar"))
    total = square.peeled
    if total.op != "sum" or total.args[0].op != "mul" or len({*total.args[0].args}) > 1:
        return None
    if low.op == "const" and low.attr > 0:
        bound = c.const(math.sqrt(low.attr))
    elif low.op == "scalar" and low.attr[1] == "s":
        bound = c.make("scalar", (), (low.attr[0], "√s"), ())
    else:
        return None
    return c.make("maximum", (c.make("sqrt", (square,), None, x.shape), bound), None, x.shape)


@composite("sqrt")
def root_of_bounded_square(c: Builder, x: Expr, shape):
    return bounded_length(c, x)


@composite("mul")
def quotient_by_bounded_length(c: Builder, x: Expr, y: Expr, shape):
    """x · rsqrt(max(s, e))"""
    for value, factor in ((x, y), (y, x)):
        length = bounded_length(c, factor.args[0]) if factor.op == "rsqrt" else None
        if length is not None:
            return c.div(value, length, shape)
    return None


# Normalisation of rows.


@rule("aten::layer_norm")
def layer_norm(
    c: Builder,
    call: Call,
    input: Expr,
    normalized_shape: Sequence[int],
    weight: Expr | None,
    bias: Expr | None,
    eps: float,
):
    dims = list(range(-len(normalized_shape), 0))
    mean = c.reduce("mean", input, dims, True, None)
    centred = c.add(input, c.neg(mean, mean.shape), input.shape)
    spread = c.variance(input, dims, 0, True, None)
    scale = c.make("rsqrt", (c.add(spread, c.const(eps), spread.shape),), None, spread.shape)
    return c.affine(c.mul(centred, scale, call.shape), weight, bias, call.shape)


@rule("aten::rms_norm")
def rms_norm(
    c: Builder,
    call: Call,
    input: Expr,
    normalized_shape: Sequence[int],
    weight: Expr | None,
    eps: float | None,
):
    if eps is None:  # that of the dtype that torch computes in, which is fp32 for half precision
        wide = torch.promote_types(call["input"].dtype, torch.float32)
        eps = torch.finfo(wide).eps
    dims = list(range(-len(normalized_shape), 0))
    mean = c.reduce("mean", c.mul(input, input, input.shape), dims, True, None)
    scale = c.make("rsqrt", (c.add(mean, c.const(eps), mean.shape),), None, mean.shape)
    return c.affine(c.mul(input, scale, call.shape), weight, None, call.shape)
