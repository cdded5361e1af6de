"""Rules of group, instance and batch norms. Each is one operator with all its operands, because its
channels, dimension 1, are not counted from the right.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_backend.capture.sizes import same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, Expr, number_and_rest, peel
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.schema_args import Call


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
