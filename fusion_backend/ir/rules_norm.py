"""Rules of reductions and normalisations.

A layer or RMS norm is expressed by its reductions, so that one written by hand is found too. A
group or batch norm is one operator with all its operands, because its channels are not counted from
the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion_backend.capture.sizes import equals, same
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, Expr, is_const, number_and_rest, peel
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
    if (
        rank < 2
        or not dims
        or call["keepdim"]
        or call["unbiased"]
        or call["correction"] not in (None, 0)
    ):
        return False
    corrected = call["unbiased"] is None and call["correction"] is None
    return not corrected and sorted(d % rank for d in dims) == [0, *range(2, rank)]


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


# Normalisation over channels.


def present(c: Builder, name: str, operands: Sequence[Expr | None], shape) -> Expr:
    """An operator whose operands may be missing; the attribute says which are present."""
    given = (e for e in operands if e is not None)
    return c.make(name, given, tuple(e is not None for e in operands), shape)


@rule("aten::group_norm")
def group_norm(
    c: Builder,
    call: Call,
    input: Expr,
    num_groups: Expr,
    weight: Expr | None,
    bias: Expr | None,
    eps: Expr,
):
    return present(c, "group_norm", [input, weight, bias, num_groups, eps], call.shape)


@rule("aten::instance_norm")
def instance_norm(
    c: Builder,
    call: Call,
    input: Expr,
    weight: Expr | None,
    bias: Expr | None,
    running_mean: Expr | None,
    running_var: Expr | None,
    use_input_stats: bool,
    eps: Expr,
):
    """Each channel is a group of its own. With running statistics it has state, or reads them."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        return None
    groups = c.const(call.shape[1])
    return present(c, "group_norm", [input, weight, bias, groups, eps], call.shape)


@rule("aten::batch_norm")
def batch_norm(
    c: Builder,
    call: Call,
    input: Expr,
    weight: Expr | None,
    bias: Expr | None,
    running_mean: Expr | None,
    running_var: Expr | None,
    training: bool,
    eps: Expr,
):
    """In inference, and in training without running statistics: with them it has state."""
    if training and running_mean is None and running_var is None:
        return present(c, "batch_norm_training", [input, weight, bias, eps], call.shape)
    if training or running_mean is None:
        return None
    running = [
        e.args[0] if e.op == "aten.detach.default" else e for e in (running_mean, running_var)
    ]
    return present(c, "batch_norm", [input, *running, weight, bias, eps], call.shape)


# Batch normalisation by hand, with one mean, var, weight and bias for every channel. The statistics
# of batch_norm have no gradient, so these must need none.


@composite("mul")
def batch_norm_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """(x - mean) · rsqrt(var + eps), or that times a weight."""
    return less_mean(c, x, y, "rsqrt", shape) or less_mean(c, y, x, "rsqrt", shape)


@composite("div")
def quotient_batch_norm(c: Builder, x: Expr, y: Expr, shape):
    """(x - mean) / √(var + eps), the root made before it is broadcast."""
    return less_mean(c, x, y, "sqrt", shape)


def less_mean(c: Builder, centred: Expr, factor: Expr, root: str, shape) -> Expr | None:
    """x - mean, multiplied or divided by a value that is made of var, eps and a weight with that
    root.
    """
    scale = channel_scale(factor, root, shape) if centred.op == "add" else None
    for x, minus in (centred.args, centred.args[::-1]) if scale else ():
        number, subtracted = number_and_rest(minus)
        if number is None or minus.op != "mul" or number.attr != -1.0 or not same(x.shape, shape):
            continue
        mean, (var, eps, weight) = per_channel(subtracted, shape), scale
        if mean is not None and is_constant(c, mean) and is_constant(c, var):
            return present(c, "batch_norm", [x, mean, var, weight, None, eps], shape)
    return None


def channel_scale(e: Expr, root: str, shape) -> tuple[Expr, Expr, Expr | None] | None:
    """var, eps and the weight of root(var + eps), or of its product with a weight, made before or
    after they are broadcast to `shape`.
    """
    if shape is None or len(shape) < 2:
        return None
    e, shape = of_vector(e, shape)
    if e.op == root:
        total, shape = of_vector(e.args[0], shape)
        eps, rest = number_and_rest(total)
        var = per_channel(rest, shape) if rest is not None and total.op == "add" else None
        return None if var is None else (var, eps, None)
    for inner, factor in (e.args, e.args[::-1]) if (e.op, root) == ("mul", "rsqrt") else ():
        weight = per_channel(factor, shape)
        found = None if weight is None or inner.op == "mul" else channel_scale(inner, root, shape)
        if found:
            return found[0], found[1], weight
    return None


def of_vector(e: Expr, shape) -> tuple[Expr, tuple]:
    """The vector that is broadcast, and the shape of one sample of it; else e and its shape."""
    v = per_channel(e, shape)
    return (e, shape) if v is None else (v, (1, shape[1]))


def is_constant(c: Builder, e: Expr) -> bool:
    """Is it known to need no gradient?"""
    return e.op == "aten.detach.default" or (bool(e.nodes) and not any(map(c.trains, e.nodes)))


# Where the weight and the bias stand among the operands of a normalisation over channels.
AFFINE = {"group_norm": (1, 2), "batch_norm": (3, 4), "batch_norm_training": (1, 2)}


@composite("mul")
def weight_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """A normalisation over channels times its weight."""
    return with_operand(c, x, y, shape, 0) or with_operand(c, y, x, shape, 0)


@composite("add")
def bias_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """A normalisation over channels plus its bias."""
    return with_operand(c, x, y, shape, 1) or with_operand(c, y, x, shape, 1)


def with_operand(c: Builder, norm: Expr, value: Expr, shape, part: int) -> Expr | None:
    """The normalisation with its weight (part 0) or its bias (part 1), where it has neither that
    nor what comes after it. The norm may have been rounded first.
    """
    norm = peel(norm)
    positions = AFFINE.get(norm.op)
    if (
        positions is None
        or any(norm.attr[i] for i in positions[part:])
        or not same(norm.shape, shape)
    ):
        return None
    vector, rest = per_channel(value, shape), iter(norm.args)
    if vector is None:
        return None
    operands = [next(rest) if there else None for there in norm.attr]
    operands[positions[part]] = vector
    return present(c, norm.op, operands, shape)


def per_channel(e: Expr, shape) -> Expr | None:
    """The vector of which e holds one element for each channel, dimension 1 of `shape`."""
    v, rank = e, len(shape)
    for _ in range(LOOKED_THROUGH):
        v = v.args[0] if v.op in ("unsqueeze", "view", "rows") else v
    if None in (e.shape, v.shape) or len(v.shape) != 1 or not rank - 1 <= len(e.shape) <= rank:
        return None
    wanted = (*(1,) * (len(e.shape) - rank + 1), shape[1], *(1,) * (rank - 2))
    return v if same(v.shape, shape[1:2]) and same(e.shape, wanted) else None
