"""Canonical forms of composites: normalisation, gelu, masks, slices. One line a rule.

Continues the table of canonical.py: a rule gets the builder `c`, the node's arguments `a` and the
shape `s` of its result, and returns an expression, or None where it does not apply.
"""

from __future__ import annotations

import math

import torch

from fusion_backend.capture.sizes import equals, same
from fusion_backend.compat.torch import schema_of, statically_known_true
from fusion_backend.ir.expr import Expr, is_const, peel

NUMBERS = ("const", "scalar", "sym")
# operators below each other: more casts, views, factors or biases than anybody writes
LOOKED_THROUGH = 16
NESTED = 4  # products in the weight of a product


def number_and_rest(e: Expr) -> tuple[Expr | None, Expr | None]:
    """A sum or product of one number and one value; (None, None) where it is not."""
    if e.op not in ("add", "mul") or len(e.args) != 2:
        return None, None
    numbers = [a for a in e.args if a.op in NUMBERS]
    rest = [a for a in e.args if a.op not in NUMBERS]
    return (numbers[0], rest[0]) if len(numbers) == len(rest) == 1 else (None, None)


def near(e: Expr, number: float) -> bool:
    """Constants of formulas are written with eight digits or more."""
    return is_const(e) and math.isclose(e.attr, number, rel_tol=2e-7)


# Normalisation.


def layer_norm(c, a, s):
    x = a("input")
    dims = list(range(-len(a.get("normalized_shape")), 0))
    mean = c.reduce("mean", x, dims, True, None)
    centred = c.add(x, c.neg(mean, mean.shape), x.shape)
    spread = c.variance(x, dims, 0, True, None)
    scale = c.make(
        "rsqrt", (c.add(spread, c.const(a.get("eps", 1e-5)), spread.shape),), None, spread.shape
    )
    return c.affine(c.mul(centred, scale, s), a("weight"), a("bias"), s)


def rms_norm(c, a, s):
    x = a("input")
    k = len(a.get("normalized_shape"))
    dtype = a.node.args[0].meta["val"].dtype
    eps = torch.finfo(dtype).eps if a.get("eps") is None else a.get("eps")
    mean = c.reduce("mean", c.mul(x, x, x.shape), list(range(-k, 0)), True, None)
    scale = c.make("rsqrt", (c.add(mean, c.const(eps), mean.shape),), None, mean.shape)
    return c.affine(c.mul(x, scale, s), a("weight"), None, s)


def vector_norm(c, a, s, order: str):
    dims = a.get("dim")
    if (
        not (a.get(order) is None or equals(a.get(order), 2))
        or a.get("dtype") is not None
        or dims is None
    ):
        return None
    if (
        order == "ord"
        and schema_of(a.node.target).name == "aten::linalg_norm"
        and not isinstance(dims, int)
    ):
        if len(dims) > 1:  # of a matrix
            return None
    x = a("self")
    square = c.reduce("sum", c.mul(x, x, x.shape), a.get("dim"), True, None)
    root = c.make("sqrt", (square,), None, square.shape)
    return root if a.get("keepdim", False) else c.make("squeeze", (root,), square.attr, s)


def present(c, name: str, operands: list[Expr | None], s):
    """An operator whose operands may be missing; the attribute says which."""
    return c.make(
        name, (e for e in operands if e is not None), tuple(e is not None for e in operands), s
    )


def group_norm(c, a, s):
    numbers = [c.const(a.get("num_groups")), c.const(a.get("eps", 1e-5))]
    return present(c, "group_norm", [a("input"), a("weight"), a("bias"), *numbers], s)


def batch_norm(c, a, s):
    """In inference only: in training it has state."""
    if a.get("training") or a("running_mean") is None:
        return None
    operands = [a(name) for name in ("input", "running_mean", "running_var", "weight", "bias")]
    operands[1:3] = [e.args[0] if e.op == "aten.detach.default" else e for e in operands[1:3]]
    return present(c, "batch_norm", [*operands, c.const(a.get("eps"))], s)


def patches(c, a, s):
    """A convolution whose windows lie side by side; any other is left as it is, one of single
    pixels too.
    """
    x, weight = a("input"), a("weight")
    kernel = tuple(weight.shape[2:])

    def each(name: str, default) -> tuple:
        given = a.get(name, default)
        given = given if isinstance(given, (list, tuple)) else (given,)
        given = tuple(n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in given)
        return given * (len(kernel) // len(given))

    none, ones, padding = (0,) * len(kernel), (1,) * len(kernel), a.get("padding", 0)
    padded = padding != "valid" if isinstance(padding, str) else not same(each("padding", 0), none)
    beside = (
        same(each("stride", 1), kernel)
        and same(each("dilation", 1), ones)
        and not same(kernel, ones)
    )
    if (
        not beside
        or padded
        or not equals(a.get("groups", 1), 1)
        or len(x.shape) != len(weight.shape)
    ):
        return None
    return present(c, "aten.conv.patches", [x, weight, a("bias")], s)


# Where the weight and the bias stand among the operands of a normalisation over channels.
AFFINE = {"group_norm": (1, 2), "batch_norm": (3, 4)}


def per_channel(e: Expr, shape) -> Expr | None:
    """The vector of which e holds one element for each channel, dimension 1 of `shape`."""
    v, rank = e, len(shape)
    for _ in range(LOOKED_THROUGH):
        v = v.args[0] if v.op in ("unsqueeze", "view", "rows") else v
    if None in (e.shape, v.shape) or len(v.shape) != 1 or not rank - 1 <= len(e.shape) <= rank:
        return None
    wanted = (*(1,) * (len(e.shape) - rank + 1), shape[1], *(1,) * (rank - 2))
    return v if same(v.shape, shape[1:2]) and same(e.shape, wanted) else None


def as_affine(c, x: Expr, y: Expr, s, part: int) -> Expr | None:
    """A normalisation over channels times its weight, or plus its bias, written by hand."""
    for norm, value in ((x, y), (y, x)):
        places = AFFINE.get(norm.op)
        if places is None or any(norm.attr[i] for i in places[part:]) or not same(norm.shape, s):
            continue
        v, rest = per_channel(value, s), iter(norm.args)
        if v is not None:
            operands = [next(rest) if there else None for there in norm.attr]
            operands[places[part]] = v
            return present(c, norm.op, operands, s)
    return None


def largest(c, a, s):
    """max over one dimension gives values and places."""
    values = c.reduce(
        "amax", a("self"), a.get("dim"), a.get("keepdim", False), a.node.meta["val"][0].shape
    )
    places = c.make(
        "argmax", (a("self"),), (a.get("dim"), a.get("keepdim", False)), a.node.meta["val"][1].shape
    )
    return c.make("tuple", (values, places))


# Choice by a mask: where(not m, x, y) is where(m, y, x).


def where(c, mask: Expr, x: Expr, y: Expr, s) -> Expr:
    while mask.op == "not":
        mask, x, y = mask.args[0], y, x
    return c.make("where", (mask, x, y), None, s)


def negated(c, a, s):
    if a.node.meta["val"].dtype != torch.bool:
        return None
    x = a("self")
    return x.args[0] if x.op == "not" else c.make("not", (x,), None, s)


# gelu by hand: x/2 · (1 + erf(x/√2)), and with tanh(√(2/π) (x + 0.044715 x³)).


def gelu(c, a, s):
    return c.make("gelu", (a("self"),), a.get("approximate", "none"), s)


def as_gelu(c, p: Expr, q: Expr, s) -> Expr | None:
    """Is p · q one of ½·x by 1 + f(x), x by ½·(1 + f(x)), or ½ by x·(1 + f(x))?"""
    for f, x in splits(p, q) + splits(q, p):
        one, bent = number_and_rest(peel(f)) if peel(f).op == "add" else (None, None)
        if one is None or not near(one, 1.0):
            continue
        bent = peel(bent)
        if bent.op == "erf" and is_multiple(bent.args[0], x, math.sqrt(0.5)):
            return c.make("gelu", (x,), "none", s)
        if bent.op == "tanh" and is_tanh_argument(bent.args[0], x):
            return c.make("gelu", (x,), "tanh", s)
    return None


def splits(p: Expr, q: Expr) -> list[tuple[Expr, Expr]]:
    """The ways of reading p · q as ½ · f · x."""
    if near(p, 0.5):
        return [q.args, q.args[::-1]] if q.op == "mul" else []
    half, rest = number_and_rest(p) if p.op == "mul" else (None, None)
    if half is None and p.op == "div" and near(p.args[1], 2.0):
        return [(q, p.args[0])]
    return [(rest, q), (q, rest)] if half is not None and near(half, 0.5) else []


def is_multiple(e: Expr, x: Expr, number: float) -> bool:
    """Is e number · x?"""
    e = peel(e)
    if e.op == "div":
        return peel(e.args[0]) is peel(x) and near(e.args[1], 1 / number)
    k, rest = number_and_rest(e) if e.op == "mul" else (None, None)
    return rest is not None and peel(rest) is peel(x) and near(k, number)


def factors_of(e: Expr, depth: int = 4) -> list[Expr]:
    """The operands of a product and of the products in it, whatever they are rounded to."""
    e = peel(e)
    if e.op != "mul" or not depth:
        return [e]
    return [f for a in e.args for f in factors_of(a, depth - 1)]


def is_tanh_argument(e: Expr, x: Expr) -> bool:
    """√(2/π) (x + 0.044715 x³), or √(2/π) x (1 + 0.044715 x²)."""
    x = peel(x)
    factors = factors_of(e)
    outer = [f for f in factors if is_const(f)]
    rest = [f for f in factors if not is_const(f) and f is not x]
    if (
        len(outer) != 1
        or not near(outer[0], math.sqrt(2 / math.pi))
        or len(rest) != 1
        or rest[0].op != "add"
    ):
        return False
    powers = 1 if x in factors else 0  # of x, outside the sum
    terms = [factors_of(t) for t in rest[0].args]
    terms.sort(key=lambda t: sum(map(power_of, t)) if len(t) > 1 else 0)
    low, high = terms
    low_fine = len(low) == 1 and (near(low[0], 1.0) if powers else low[0] is x)
    k = [f for f in high if is_const(f)]
    exponents = [power_of(f, x) for f in high if not is_const(f)]
    return (
        low_fine
        and len(k) == 1
        and near(k[0], 0.044715)
        and None not in exponents
        and sum(exponents) == 3 - powers
    )


def power_of(f: Expr, x: Expr | None = None):
    """n where f is xⁿ, else None; without an x, a number to sort by."""
    if x is None:
        return 0 if is_const(f) else 1
    if f is x:
        return 1
    return int(f.attr) if f.op == "pow" and peel(f.args[0]) is x and f.attr in (2, 3) else None


# Parts of the last dimension.


def part(c, x: Expr, dim: int, start, stop, step, s, depth: int = NESTED) -> Expr:
    """A slice; one half of a dimension is told from other slices, so that it does not depend on the
    size.
    """
    size = x.shape[dim]
    axis = dim - len(x.shape)
    columns = part_of_product(c, x, start, stop, step, s, depth) if axis == -1 and depth else None
    if columns is not None:
        return columns
    if not all(isinstance(v, int) for v in (size, start, stop, step)):
        halves = {0: (0, size // 2), 1: (size // 2, size)}
        for k, bounds in halves.items() if equals(step, 1) else ():
            if same((start, stop), bounds):
                return c.make("half", (x,), (axis, k), s)
        return c.make("slice", (x,), (axis, str(start), str(stop), str(step)), s)
    start, stop = (max(v + size, 0) if v < 0 else min(v, size) for v in (start, stop))
    if (start, stop, step) == (0, size, 1):
        return x
    if step == 1 and size % 2 == 0 and (start, stop) in ((0, size // 2), (size // 2, size)):
        return c.make("half", (x,), (axis, 1 if start else 0), s)
    if step == 2 and size % 2 == 0 and start in (0, 1) and stop == size:
        return c.make("every_other", (x,), (axis, start), s)
    return c.make("slice", (x,), (axis, start, stop, step), s)


def part_of_product(c, x: Expr, start, stop, step, s, depth: int) -> Expr | None:
    """Columns of x W + b are x times columns of W, plus those of b: packed weights are weights side
    by side.
    """
    if x.op == "matmul" and x.args[1].shape is not None and len(x.args[1].shape) == 2:
        rows = x.args[1].shape[0]
        columns = part(c, x.args[1], 1, start, stop, step, (rows, s[-1]), depth - 1)
        return c.make("matmul", (x.args[0], columns), None, s)
    for y, b in (x.args, x.args[::-1]) if x.op == "add" else ():
        if b.shape is not None and y.op == "matmul" and same(b.shape, x.shape[-1:]):
            y = part_of_product(c, y, start, stop, step, s, depth)
            return y and c.add(y, part(c, b, 0, start, stop, step, (s[-1],), depth - 1), s)
    return None


def sliced(c, a, s):
    x = a("self")
    if x.shape is None or not x.shape:
        return None
    dim = a.get("dim", 0) % len(x.shape)
    start, stop = a.get("start"), a.get("end")
    stop = x.shape[dim] if stop is None or equals(stop, 2**63 - 1) else stop
    return part(c, x, dim, 0 if start is None else start, stop, a.get("step", 1), s)


def glu(c, a, s):
    x, dim = a("self"), a.get("dim", -1) % len(s)
    size = s[dim]
    up, gate = (part(c, x, dim, k * size, (k + 1) * size, 1, s) for k in (0, 1))
    return c.mul(up, c.make("sigmoid", (gate,), None, s), s)


def narrowed(c, a, s):
    x, start, length = a("self"), a.get("start"), a.get("length")
    dim = a.get("dim") % len(x.shape)
    if isinstance(start, int) and start < 0:
        start += x.shape[dim]
    # or it may count from the end
    known = not isinstance(start, torch.Tensor) and statically_known_true(start >= 0)
    return part(c, x, dim, start, start + length, 1, s) if known else None


def pieces(c, a, s):
    """chunk and split: their pieces are slices, one after the other."""
    x = a("self")
    outs = a.node.meta["val"]
    dim = a.get("dim", 0) % len(x.shape)
    if len(outs) == 2 and same(outs[0].shape, outs[1].shape):
        shape = tuple(outs[0].shape)
        size = x.shape[dim]
        bounds = ((0, size // 2), (size // 2, size))
        return c.make("tuple", [part(c, x, dim, start, stop, 1, shape) for start, stop in bounds])
    found, start = [], 0
    for out in outs:
        found.append(part(c, x, dim, start, start + out.shape[dim], 1, tuple(out.shape)))
        start += out.shape[dim]
    return c.make("tuple", found)


RULES = {
    "aten::layer_norm": layer_norm,
    "aten::rms_norm": rms_norm,
    "aten::linalg_vector_norm": lambda c, a, s: vector_norm(c, a, s, "ord"),
    "aten::linalg_norm": lambda c, a, s: vector_norm(c, a, s, "ord"),
    "aten::group_norm": group_norm,
    "aten::batch_norm": batch_norm,
    "aten::conv1d": patches,
    "aten::conv2d": patches,
    "aten::conv3d": patches,
    "aten::amax": lambda c, a, s: c.reduce(
        "amax", a("self"), a.get("dim"), a.get("keepdim", False), s
    ),
    "aten::max": lambda c, a, s: largest(c, a, s) if "dim" in a.values else None,
    "aten::abs": lambda c, a, s: c.make("abs", (a("self"),), None, s),
    "aten::round": lambda c, a, s: (
        None if a.get("decimals") else c.make("round", (a("self"),), None, s)
    ),
    "aten::erf": lambda c, a, s: c.make("erf", (a("self"),), None, s),
    "aten::tanh": lambda c, a, s: c.make("tanh", (a("self"),), None, s),
    "aten::gelu": gelu,
    "aten::where": lambda c, a, s: (
        where(c, a("condition"), a("self"), a("other"), s) if a("self") else None
    ),
    "aten::masked_fill": lambda c, a, s: where(c, a("mask"), a("value"), a("self"), s),
    "aten::bitwise_not": negated,
    "aten::logical_not": negated,
    "aten::glu": glu,
    "aten::slice": sliced,
    "aten::narrow": narrowed,
    "aten::chunk": pieces,
    "aten::split": pieces,
    "aten::split_with_sizes": pieces,
}
