"""Canonical view: the equivalences between spellings, as data. One line a rule.

Graphs and patterns are both read into hash-consed expressions; the graph itself is not touched. Dimensions are counted
from the right, so that a pattern traced on [5, 7] fits [2, 5, 7]; broadcasting is implicit; commutative operands are
ordered. Float casts stay visible as `cast` expressions, which the matcher may look through (see matcher.py).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from fusion_backend.capture import is_lowered
from fusion_backend.torch_api import statically_known_true

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "and", "or"}
# Operators that cost nothing worth counting when they are done twice.
FREE = {"permute", "view", "expand", "squeeze", "unsqueeze", "cast", "const", "scalar", "sym"}
LEAVES = {"var", "scalar", "const", "sym", "input"}
# Between these a cast only changes the rounding of an intermediate value, and a fused kernel rounds once.
ROUNDING_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Expr:
    """One canonical value: an operator, its operands, and what else tells it apart."""

    __slots__ = ("args", "attr", "id", "nodes", "op", "shape")

    def __init__(self, op: str, args: tuple[Expr, ...], attr, shape, id: int):
        self.op, self.args, self.attr, self.shape, self.id = op, args, attr, shape, id
        self.nodes: list[fx.Node] = []  # graph nodes with this value, in graph order

    def __repr__(self):
        attr = "" if self.attr is None else f"[{self.attr}]"
        args = f"({', '.join(map(repr, self.args))})" if self.args else ""
        return f"{self.op}{attr}{args}"


def is_const(e: Expr) -> bool:
    return e.op == "const"


def hashable(value):
    """Non-tensor arguments as part of a key. Symbolic sizes by their expression."""
    if isinstance(value, (list, tuple)):
        return tuple(hashable(v) for v in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return value


def from_right(dims, rank: int) -> tuple[int, ...]:
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return tuple(sorted(d % rank - rank for d in dims)) if rank else ()


class Canon:
    """Reads a graph into expressions. `scalar_of(number)` lets a pattern name its captured scalars."""

    def __init__(self, scalar_of=None):
        self.table: dict[tuple, Expr] = {}
        self.of: dict[fx.Node, Expr] = {}
        self.scalar_of = scalar_of or (lambda number: None)
        self.state = None  # values computed under another grad mode or autocast are other values

    # Building expressions.

    def make(self, op: str, args=(), attr=None, shape=None) -> Expr:
        args = tuple(args)
        if op in COMMUTATIVE:
            args = tuple(sorted(args, key=lambda a: a.id))
        key = (op, tuple(a.id for a in args), attr, self.state)
        found = self.table.get(key)
        if found is None:
            found = self.table[key] = Expr(op, args, attr, shape, len(self.table))
        return found

    def const(self, number) -> Expr:
        scalar = self.scalar_of(number)
        if scalar is not None:
            return self.make("scalar", (), scalar, ())
        kind = "sym" if isinstance(number, (torch.SymInt, torch.SymFloat)) else "const"
        return self.make(kind, (), str(number) if kind == "sym" else float(number), ())

    def elementwise(self, op: str, *args: Expr, shape, attr=None) -> Expr:
        return self.make(op, (self.broadcastable(a, args, shape) for a in args), attr, shape)

    def broadcastable(self, a: Expr, among: tuple[Expr, ...], shape) -> Expr:
        """An operand without the expand that broadcasting does anyway."""
        if a.op != "expand" or a.args[0].shape is None:
            return a
        others = [b.shape for b in among if b is not a and b.shape is not None]
        try:
            same = torch.broadcast_shapes(a.args[0].shape, *others) == torch.Size(shape)
        except (RuntimeError, TypeError):  # symbolic or incompatible: leave the expand where it is
            return a
        return a.args[0] if same else a

    def add(self, x: Expr, y: Expr, shape) -> Expr:
        return self.elementwise("add", x, y, shape=shape)

    def mul(self, x: Expr, y: Expr, shape) -> Expr:
        for a, b in ((x, y), (y, x)):
            if is_const(b) and b.attr == 1.0:
                return a
            if is_const(b) and a.op == "mul" and any(is_const(c) for c in a.args):
                inner, factor = sorted(a.args, key=is_const)
                return self.mul(inner, self.const(factor.attr * b.attr), shape)
        return self.elementwise("mul", x, y, shape=shape)

    def neg(self, x: Expr, shape) -> Expr:
        return self.const(-x.attr) if is_const(x) else self.mul(x, self.const(-1.0), shape)

    def scale(self, x: Expr, alpha, shape) -> Expr:
        if alpha == 1:
            return x
        return self.const(x.attr * alpha) if is_const(x) else self.mul(x, self.const(alpha), shape)

    def div(self, x: Expr, y: Expr, shape) -> Expr:
        if y.op == "sqrt":
            return self.mul(x, self.make("rsqrt", y.args, None, y.shape), shape)
        if self.is_count(x, y):
            return self.make("mean", x.args, x.attr, x.shape)
        if is_const(x) and x.attr == 1.0 and y.op == "add":  # 1 / (1 + exp(-a)) is sigmoid(a)
            e, one = sorted(y.args, key=is_const)
            if is_const(one) and one.attr == 1.0 and e.op == "exp" and e.args[0].op == "mul":
                inner, minus = sorted(e.args[0].args, key=is_const)
                if is_const(minus) and minus.attr == -1.0:
                    return self.make("sigmoid", (inner,), None, shape)
        return self.elementwise("div", x, y, shape=shape)

    def is_count(self, x: Expr, y: Expr) -> bool:
        """Is x a sum, and y the number of its terms?"""
        if x.op != "sum" or y.op not in ("const", "sym") or x.args[0].shape is None:
            return False
        count = math.prod(x.args[0].shape[d] for d in x.attr)
        return str(count) == y.attr if y.op == "sym" else statically_known_true(count == y.attr)

    def clamp(self, x: Expr, low, high, shape) -> Expr:
        if low is not None:
            x = self.make("maximum", (x, low), None, shape)
        if high is not None:
            x = self.make("minimum", (x, high), None, shape)
        return x

    def maximum(self, x: Expr, y: Expr, shape) -> Expr:
        x, y = sorted((x, y), key=is_const)
        if is_const(y) and x.op == "minimum":  # max(min(x, hi), lo) with lo <= hi is min(max(x, lo), hi)
            inner, high = sorted(x.args, key=is_const)
            if is_const(high) and y.attr <= high.attr:
                return self.clamp(inner, y, high, shape)
        return self.elementwise("maximum", x, y, shape=shape)

    def power(self, x: Expr, p, shape) -> Expr:
        spelled = {1: lambda: x, 2: lambda: self.mul(x, x, shape), 0.5: lambda: self.make("sqrt", (x,), None, shape),
                   -0.5: lambda: self.make("rsqrt", (x,), None, shape), -1: lambda: self.div(self.const(1.0), x, shape)}  # fmt: skip
        return spelled[p]() if p in spelled else self.make("pow", (x,), p, shape)

    def reduce(self, op: str, x: Expr, dims, keepdim: bool, shape) -> Expr:
        """Reductions keep their dimensions; dropping them is a squeeze around it."""
        if x.shape is None:
            return self.make(op, (x,), ("?", hashable(dims), keepdim), shape)
        axes = from_right(dims, len(x.shape))
        kept = tuple(1 if i - len(x.shape) in axes else s for i, s in enumerate(x.shape))
        out = self.make(op, (x,), axes, kept)
        return out if keepdim or not axes else self.make("squeeze", (out,), axes, shape)

    def variance(self, x: Expr, dims, correction, keepdim: bool, shape) -> Expr:
        """The biased variance as mean((x - mean(x))²); any other correction is its own operator."""
        if correction not in (0, False) or x.shape is None:
            return self.reduce(f"var{correction}", x, dims, keepdim, shape)
        mean = self.reduce("mean", x, dims, True, None)
        centred = self.add(x, self.neg(mean, mean.shape), x.shape)
        return self.reduce("mean", self.mul(centred, centred, x.shape), dims, keepdim, shape)

    def permute(self, x: Expr, order: list[int], shape) -> Expr:
        """Leading dimensions that stay put do not count."""
        rank = len(order)
        moved = [d % rank - rank for d in order]
        while moved and moved[0] == -len(moved):
            moved.pop(0)
        if not moved:
            return x
        if x.op == "permute" and len(x.attr) == len(moved):
            both = tuple(x.attr[d] for d in moved)
            identity = both == tuple(range(-len(both), 0))
            return x.args[0] if identity else self.make("permute", x.args, both, shape)
        return self.make("permute", (x,), tuple(moved), shape)

    def transpose(self, x: Expr, i: int, j: int, shape) -> Expr:
        order = list(range(len(shape)))
        order[i], order[j] = order[j], order[i]
        return self.permute(x, order, shape)

    def linear(self, x: Expr, w: Expr, b: Expr | None, shape) -> Expr:
        wt = self.transpose(w, 0, 1, tuple(reversed(w.shape))) if w.shape and len(w.shape) == 2 else None
        if wt is None:
            return self.make("linear", (x, w) if b is None else (x, w, b), None, shape)
        return self.bias(self.make("matmul", (x, wt), None, shape), b, shape)

    def bias(self, x: Expr, b: Expr | None, shape) -> Expr:
        return x if b is None else self.add(x, b, shape)

    def affine(self, x: Expr, w: Expr | None, b: Expr | None, shape) -> Expr:
        return self.bias(x if w is None else self.mul(x, w, shape), b, shape)

    def cast(self, x: Expr, source: torch.dtype, target: torch.dtype, shape) -> Expr:
        """`cast` changes a rounding only; `convert` changes the kind of number and is never looked through."""
        rounding = source in ROUNDING_DTYPES and target in ROUNDING_DTYPES
        return x if source == target else self.make("cast" if rounding else "convert", (x,), target, shape)

    # Reading a graph.

    def variable(self, n: fx.Node, name: str) -> None:
        """Let a pattern's placeholder stand for anything."""
        self.of[n] = self.make("var", (), name, shape_of(n))

    def run(self, graph: fx.Graph, region=None, fences=frozenset()) -> Canon:
        for n in graph.nodes:
            if n.op == "output":
                continue
            self.state = (region or {}).get(n)
            e = self.of.get(n) or self.read(n, fences)
            self.of[n] = e
            e.nodes.append(n)
        return self

    def read(self, n: fx.Node, fences) -> Expr:
        if n.op == "call_function" and n.target is operator.getitem and self.of[n.args[0]].op == "tuple":
            return self.of[n.args[0]].args[n.args[1]]
        if not is_lowered(n) or n in fences:
            return self.make("input", (), n.name, shape_of(n))
        rule = RULES.get(n.target._schema.name)
        e = rule(self, Args(self, n), shape_of(n)) if rule is not None else None
        if e is not None:
            return e
        if unrepeatable(n):
            return self.make("input", (), n.name, shape_of(n))
        tensors = tuple(self.of[a] for a in n.all_input_nodes)
        rest = (tuple(map(key_part, n.args)), tuple((k, key_part(v)) for k, v in sorted(n.kwargs.items())))
        return self.make(str(n.target), tensors, rest, shape_of(n))


class Args:
    """The arguments of a node by their schema names: `a("other")` as an expression, `a.get("dim")` as it is."""

    def __init__(self, canon: Canon, node: fx.Node):
        self.canon, self.node = canon, node
        names = [a.name for a in node.target._schema.arguments]
        self.values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def get(self, name: str, default=None):
        value = self.values.get(name, default)
        return value.meta.get("val", value) if isinstance(value, fx.Node) else value

    def __call__(self, name: str) -> Expr | None:
        value = self.values.get(name)
        if value is None or isinstance(value, fx.Node):
            return None if value is None else self.canon.of[value]
        return self.canon.const(value)


def key_part(value):
    """An argument as part of an expression's key; tensors count through the operands."""
    if isinstance(value, (list, tuple)):
        return tuple(key_part(v) for v in value)
    return "tensor" if isinstance(value, fx.Node) else hashable(value)


def shape_of(n: fx.Node):
    value = n.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def unrepeatable(n: fx.Node) -> bool:
    """Two such nodes with the same arguments are not the same value."""
    return torch.Tag.nondeterministic_seeded in n.target.tags or n.target._schema.is_mutable


def same_device_cast(c: Canon, a: Args, s):
    source, target = a.node.args[0].meta["val"], a.node.meta["val"]
    if source.device != target.device or source.layout != target.layout:
        return None
    return c.cast(a("self"), source.dtype, target.dtype, s)


def reshaped(c: Canon, a: Args, s):
    x = a("self")
    return x if x.shape == s else c.make("view", (x,), hashable(s), s)


def unsqueezed(c: Canon, a: Args, s):
    x, axis = a("self"), (a.get("dim") % len(s)) - len(s)
    return x.args[0] if x.op == "squeeze" and x.attr == (axis,) else c.make("unsqueeze", (x,), axis, s)


def reduction(c: Canon, a: Args, s, op: str):
    if a.get("dtype") is not None:
        return None
    return c.reduce(op, a("self"), a.get("dim"), a.get("keepdim", False), s)


def variance_of(c: Canon, a: Args, shape):
    correction = a.get("correction", 1) if "unbiased" not in a.values else a.get("unbiased")
    return c.variance(a("self"), a.get("dim"), correction, a.get("keepdim", False), shape)


def plain_addmm(c: Canon, a: Args, s):
    if (a.get("beta", 1), a.get("alpha", 1)) != (1, 1):
        return None
    return c.bias(c.make("matmul", (a("mat1"), a("mat2")), None, s), a("self"), s)


def constant(c: Canon, a: Args, s, name: str):
    number = a.get(name)
    return c.const(number) if s == () and isinstance(number, (int, float)) else None


# What a spelling means. c builds, a holds the node's arguments, s is the shape of its result.
RULES = {
    # x + alpha·y; subtraction is the addition of −1·y
    "aten::add": lambda c, a, s: c.add(a("self"), c.scale(a("other"), a.get("alpha", 1), s), s),
    "aten::sub": lambda c, a, s: c.add(a("self"), c.neg(c.scale(a("other"), a.get("alpha", 1), s), s), s),
    "aten::rsub": lambda c, a, s: c.add(a("other"), c.neg(c.scale(a("self"), a.get("alpha", 1), s), s), s),
    "aten::mul": lambda c, a, s: c.mul(a("self"), a("other"), s),
    "aten::neg": lambda c, a, s: c.neg(a("self"), s),
    "aten::addcmul": lambda c, a, s: c.add(
        a("self"), c.scale(c.mul(a("tensor1"), a("tensor2"), s), a.get("value", 1), s), s
    ),
    # division; 1/sqrt is rsqrt, sum/n is mean, 1/(1+exp(−x)) is sigmoid
    "aten::div": lambda c, a, s: None if a.get("rounding_mode") else c.div(a("self"), a("other"), s),
    "aten::reciprocal": lambda c, a, s: c.div(c.const(1.0), a("self"), s),
    # powers
    "aten::pow": lambda c, a, s: None if is_tensor(a.get("exponent")) else c.power(a("self"), a.get("exponent"), s),
    "aten::square": lambda c, a, s: c.mul(a("self"), a("self"), s),
    "aten::sqrt": lambda c, a, s: c.make("sqrt", (a("self"),), None, s),
    "aten::rsqrt": lambda c, a, s: c.make("rsqrt", (a("self"),), None, s),
    # elementwise functions
    "aten::exp": lambda c, a, s: c.make("exp", (a("self"),), None, s),
    "aten::sigmoid": lambda c, a, s: c.make("sigmoid", (a("self"),), None, s),
    "aten::silu": lambda c, a, s: c.mul(a("self"), c.make("sigmoid", (a("self"),), None, s), s),
    # min/max: clamp, relu and hardtanh are the same two operators
    "aten::maximum": lambda c, a, s: c.maximum(a("self"), a("other"), s),
    "aten::minimum": lambda c, a, s: c.elementwise("minimum", a("self"), a("other"), shape=s),
    "aten::clamp": lambda c, a, s: c.clamp(a("self"), a("min"), a("max"), s),
    "aten::clip": lambda c, a, s: c.clamp(a("self"), a("min"), a("max"), s),
    "aten::clamp_min": lambda c, a, s: c.maximum(a("self"), a("min"), s),
    "aten::clamp_max": lambda c, a, s: c.clamp(a("self"), None, a("max"), s),
    "aten::relu": lambda c, a, s: c.clamp(a("self"), c.const(0.0), None, s),
    "aten::hardtanh": lambda c, a, s: c.clamp(
        a("self"), c.const(a.get("min_val", -1.0)), c.const(a.get("max_val", 1.0)), s
    ),
    # reductions
    "aten::sum": lambda c, a, s: reduction(c, a, s, "sum"),
    "aten::mean": lambda c, a, s: reduction(c, a, s, "mean"),
    "aten::var": lambda c, a, s: variance_of(c, a, s),
    "aten::std": lambda c, a, s: c.make("sqrt", (variance_of(c, a, s),), None, s),
    "aten::var_mean": lambda c, a, s: c.make(
        "tuple", (variance_of(c, a, s), c.reduce("mean", a("self"), a.get("dim"), a.get("keepdim", False), s))
    ),
    # normalisation over the last k dimensions, its affine part apart
    "aten::layer_norm": lambda c, a, s: c.affine(
        c.make("normalize", (a("input"), c.const(a.get("eps", 1e-5))), len(a.get("normalized_shape")), s),
        a("weight"), a("bias"), s,
    ),
    # matrix products
    "aten::linear": lambda c, a, s: c.linear(a("input"), a("weight"), a("bias"), s),
    "aten::matmul": lambda c, a, s: c.make("matmul", (a("self"), a("other")), None, s),
    "aten::mm": lambda c, a, s: c.make("matmul", (a("self"), a("mat2")), None, s),
    "aten::bmm": lambda c, a, s: c.make("matmul", (a("self"), a("mat2")), None, s),
    "aten::addmm": plain_addmm,
    # order and shape
    "aten::t": lambda c, a, s: c.permute(a("self"), list(reversed(range(len(s)))), s),
    "aten::numpy_T": lambda c, a, s: c.permute(a("self"), list(reversed(range(len(s)))), s),
    "aten::mT": lambda c, a, s: c.transpose(a("self"), -2, -1, s),
    "aten::transpose": lambda c, a, s: c.transpose(a("self"), a.get("dim0"), a.get("dim1"), s),
    "aten::permute": lambda c, a, s: c.permute(a("self"), a.get("dims"), s),
    "aten::expand": lambda c, a, s: a("self") if a("self").shape == s else c.make("expand", (a("self"),), hashable(s), s),
    "aten::view": reshaped,
    "aten::reshape": reshaped,
    "aten::_unsafe_view": reshaped,
    "aten::flatten": reshaped,
    "aten::unflatten": reshaped,
    "aten::unsqueeze": unsqueezed,
    # the same value
    "aten::clone": lambda c, a, s: a("self"),
    "aten::contiguous": lambda c, a, s: a("self"),
    "aten::alias": lambda c, a, s: a("self"),
    "aten::dropout": lambda c, a, s: a("input") if not a.get("train") or a.get("p") == 0 else None,
    # casts
    "aten::to": same_device_cast,
    "aten::_to_copy": same_device_cast,
    "aten::type_as": same_device_cast,
    # numbers held in 0-d tensors
    "aten::full": lambda c, a, s: constant(c, a, s, "fill_value"),
    "aten::scalar_tensor": lambda c, a, s: constant(c, a, s, "s"),
}
for spelled, name in {"multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div"}.items():
    RULES[f"aten::{spelled}"] = RULES[f"aten::{name}"]


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)
