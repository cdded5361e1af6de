"""Canonical view: the equivalences between spellings, as data. One line a rule.

Graphs and patterns are both read into hash-consed expressions (expressions.py); the graph itself is
not touched. Dimensions are counted from the right, so that a pattern traced on [5, 7] fits [2, 5,
7]; broadcasting is implicit; commutative operands are ordered. Float casts stay visible as `cast`
expressions, which the matcher may look through.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from fusion_backend.capture.sizes import equals, hashable, same
from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import schema_of
from fusion_backend.ir import rules_attention as attention
from fusion_backend.ir import rules_norm as composites
from fusion_backend.ir.expr import Builder, Expr
from fusion_backend.reporting.faults import refusal


class Canon(Builder):
    """Reads a graph into expressions."""

    def __init__(self, scalar_of=None):
        super().__init__(scalar_of)
        self.of: dict[fx.Node, Expr] = {}
        self.faults: dict[fx.Node, str] = {}  # a node whose rule failed -> how

    def variable(self, n: fx.Node, name: str) -> None:
        """Let a pattern's placeholder stand for anything."""
        self.of[n] = self.make("var", (), name, shape_of(n))

    def run(self, graph: fx.Graph, region=None, fences=frozenset()) -> Canon:
        for n in graph.nodes:
            if n.op == "output":
                continue
            self.state = (region or {}).get(n)
            e = self.of.get(n) or self.read(n, fences)
            # 3 * i in integers and 3.0 * i are two values
            if e.nodes and kind_of(e.nodes[0]) != kind_of(n):
                e = self.make(f"as {kind_of(n)}", (e,), None, e.shape)
            self.of[n] = e
            e.nodes.append(n)
        return self

    def mul(self, x: Expr, y: Expr, shape) -> Expr:
        return (
            composites.as_gelu(self, x, y, shape)
            or composites.as_affine(self, x, y, shape, 0)
            or super().mul(x, y, shape)
        )

    def add(self, x: Expr, y: Expr, shape) -> Expr:
        return composites.as_affine(self, x, y, shape, 1) or super().add(x, y, shape)

    def div(self, x: Expr, y: Expr, shape) -> Expr:
        return attention.as_softmax(self, x, y, shape) or super().div(x, y, shape)

    def filled(self, number: float, a: Args, shape) -> Expr | None:
        same = a.node.meta["val"].dtype == a.node.args[0].meta["val"].dtype
        return self.make("expand", (self.const(number),), hashable(shape), shape) if same else None

    def read(self, n: fx.Node, fences) -> Expr:
        if (
            n.op == "call_function"
            and n.target is operator.getitem
            and self.of[n.args[0]].op == "tuple"
        ):
            return self.of[n.args[0]].args[n.args[1]]
        if n.target is torch.tensor and len(n.args) == 1 and type(n.args[0]) in (int, float):
            return self.const(held(n.args[0], n.meta["val"].dtype))
        if not is_lowered(n) or n in fences:
            return self.make("input", (), n.name, shape_of(n))
        e = self.by_rule(n)
        if e is not None:
            return e
        if unrepeatable(n):
            return self.make("input", (), n.name, shape_of(n))
        tensors = tuple(self.of[a] for a in n.all_input_nodes)
        return self.make(str(n.target), tensors, other_arguments(n), shape_of(n))

    def by_rule(self, n: fx.Node) -> Expr | None:
        """What the rule of its operator says. A rule that fails does not apply, and one that needs
        a guard neither.
        """
        rule = RULES.get(schema_of(n.target).name)
        if rule is None:
            return None
        try:
            return rule(self, Args(self, n), shape_of(n))
        except Exception as error:
            _, fault = refusal(error, f"the rule of {schema_of(n.target).name}")
            if fault is not None:
                self.faults[n] = fault
            return None


class Args:
    """The arguments of a node by their schema names: `a("other")` as an expression, `a.get("dim")`
    as it is.
    """

    def __init__(self, canon: Canon, node: fx.Node):
        self.canon, self.node = canon, node
        names = [a.name for a in schema_of(node.target).arguments]
        self.values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def get(self, name: str, default=None):
        value = self.values.get(name, default)
        return value.meta.get("val", value) if isinstance(value, fx.Node) else value

    def __call__(self, name: str) -> Expr | None:
        value = self.values.get(name)
        if value is None or isinstance(value, fx.Node):
            return None if value is None else self.canon.of[value]
        return self.canon.const(value)


@functools.lru_cache(4096)
def defaults_of(op) -> dict[str, object]:
    """Arguments by name, in order, each with its default (itself NotImplemented where there is
    none).
    """
    return {
        a.name: a.default_value if a.has_default_value() else NotImplemented
        for a in schema_of(op).arguments
    }


def other_arguments(n: fx.Node) -> tuple:
    """What tells an operator apart besides its operands; a default that is written out is no
    difference.
    """
    defaults = defaults_of(n.target)
    given = [*zip(defaults, n.args, strict=False), *sorted(n.kwargs.items())]
    parts = [(name, key_part(v), defaults[name]) for name, v in given]
    return tuple(
        (name, part)
        for name, part, default in parts
        if type(part) is not type(default) or part != default
    )


def key_part(value):
    """An argument as part of an expression's key; tensors count through the operands."""
    if isinstance(value, (list, tuple)):
        return tuple(key_part(v) for v in value)
    return "tensor" if isinstance(value, fx.Node) else hashable(value)


def shape_of(n: fx.Node):
    value = n.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def kind_of(n: fx.Node) -> str:
    """Of numbers; "" of what is no tensor."""
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return "floats" if dtype.is_floating_point else "complex numbers"
    return "booleans" if dtype == torch.bool else "integers"


def unrepeatable(n: fx.Node) -> bool:
    """Two such nodes with the same arguments are not the same value."""
    if schema_of(n.target).name == "aten::scaled_dot_product_attention":
        return (n.args[4] if len(n.args) > 4 else n.kwargs.get("dropout_p", 0.0)) != 0
    return torch.Tag.nondeterministic_seeded in n.target.tags or schema_of(n.target).is_mutable


def same_device_cast(c: Canon, a: Args, s):
    source, target = a.node.args[0].meta["val"], a.node.meta["val"]
    if source.device != target.device or source.layout != target.layout:
        return None
    return c.cast(a("self"), source.dtype, target.dtype, s)


def dropped(c: Canon, a: Args, s):
    """Every draw is another value: its name tells it apart, and the matcher does not compare the
    names.
    """
    if not a.get("train") or equals(a.get("p"), 0):
        return a("input")
    return c.make("dropout", (a("input"), c.const(a.get("p"))), a.node.name, s)


def expanded(c: Canon, a: Args, s):
    x = a("self")
    return x if same(x.shape, s) else c.make("expand", (x,), hashable(s), s)


def unsqueezed(c: Canon, a: Args, s):
    x, axis = a("self"), (a.get("dim") % len(s)) - len(s)
    return (
        x.args[0] if x.op == "squeeze" and x.attr == (axis,) else c.make("unsqueeze", (x,), axis, s)
    )


def squeezed(c: Canon, a: Args, s):
    x, dim = a("self"), a.get("dim")
    if not isinstance(dim, int) or x.shape is None:
        return None
    axis = (dim % max(len(x.shape), 1)) - len(x.shape)
    if len(x.shape) == len(s):  # not of size 1: nothing happens
        return x
    return (
        x.args[0] if x.op == "unsqueeze" and x.attr == axis else c.make("squeeze", (x,), (axis,), s)
    )


def reduction(c: Canon, a: Args, s, op: str):
    if a.get("dtype") is not None:
        return None
    return c.reduce(op, a("self"), a.get("dim"), a.get("keepdim", False), s)


def variance_of(c: Canon, a: Args, shape):
    correction = a.get("correction", 1) if "unbiased" not in a.values else a.get("unbiased")
    return c.variance(a("self"), a.get("dim"), correction, a.get("keepdim", False), shape)


def product(c: Canon, x: Expr, y: Expr, s):
    """Of integers converted to int32, or to fp64: exact, and the same as the product that takes
    int8.
    """
    if all(e.op == "convert" and e.attr in (torch.int32, torch.float64) for e in (x, y)):
        if x.attr == y.attr == torch.int32:
            return c.make("int_matmul", (x.args[0], y.args[0]), None, s)
    return c.make("matmul", (x, y), None, s)


def added_product(c: Canon, a: Args, s, left: str, right: str):
    """beta · self + alpha · left @ right; without self where beta is 0."""
    product = c.scale(c.make("matmul", (a(left), a(right)), None, s), a.get("alpha", 1), s)
    return (
        product
        if equals(a.get("beta", 1), 0)
        else c.add(product, c.scale(a("self"), a.get("beta", 1), s), s)
    )


def constant(c: Canon, a: Args, s, name: str):
    number, dtype = a.get(name), a.node.meta["val"].dtype
    if s != () or not isinstance(number, (int, float)) or dtype == torch.bool:
        return None
    return c.const(held(number, dtype))


def held(number: float, dtype: torch.dtype) -> float:
    """The number that a tensor of this dtype holds; one in fp32 stands for itself."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    return torch.tensor(number, dtype=dtype).item() if whole or dtype.itemsize < 4 else number


# What a spelling means. c builds, a holds the node's arguments, s is the shape of its result.
RULES = {
    # x + alpha·y; subtraction is the addition of −1·y
    "aten::add": lambda c, a, s: c.add(a("self"), c.scale(a("other"), a.get("alpha", 1), s), s),
    "aten::sub": lambda c, a, s: c.add(
        a("self"), c.neg(c.scale(a("other"), a.get("alpha", 1), s), s), s
    ),
    "aten::rsub": lambda c, a, s: c.add(
        a("other"), c.neg(c.scale(a("self"), a.get("alpha", 1), s), s), s
    ),
    "aten::mul": lambda c, a, s: c.mul(a("self"), a("other"), s),
    "aten::neg": lambda c, a, s: c.neg(a("self"), s),
    "aten::addcmul": lambda c, a, s: c.add(
        a("self"), c.scale(c.mul(a("tensor1"), a("tensor2"), s), a.get("value", 1), s), s
    ),
    # division; 1/sqrt is rsqrt, sum/n is mean, 1/(1+exp(−x)) is sigmoid
    "aten::div": lambda c, a, s: (
        None if a.get("rounding_mode") else c.div(a("self"), a("other"), s)
    ),
    "aten::reciprocal": lambda c, a, s: c.div(c.const(1.0), a("self"), s),
    # powers
    "aten::pow": lambda c, a, s: (
        None if is_tensor(a.get("exponent")) else c.power(a("self"), a.get("exponent"), s)
    ),
    "aten::square": lambda c, a, s: c.mul(a("self"), a("self"), s),
    "aten::sqrt": lambda c, a, s: c.make("sqrt", (a("self"),), None, s),
    "aten::rsqrt": lambda c, a, s: c.make("rsqrt", (a("self"),), None, s),
    # elementwise functions
    "aten::exp": lambda c, a, s: c.make("exp", (a("self"),), None, s),
    "aten::sigmoid": lambda c, a, s: c.make("sigmoid", (a("self"),), None, s),
    "aten::softplus": lambda c, a, s: c.make(
        "softplus", (a("self"),), (float(a.get("beta", 1)), float(a.get("threshold", 20))), s
    ),
    "aten::mish": lambda c, a, s: c.mul(
        a("self"), c.make("tanh", (c.make("softplus", (a("self"),), (1.0, 20.0), s),), None, s), s
    ),
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
        "tuple",
        (
            variance_of(c, a, s),
            c.reduce("mean", a("self"), a.get("dim"), a.get("keepdim", False), s),
        ),
    ),
    # matrix products
    "aten::linear": lambda c, a, s: c.linear(a("input"), a("weight"), a("bias"), s),
    "aten::matmul": lambda c, a, s: product(c, a("self"), a("other"), s),
    "aten::mm": lambda c, a, s: product(c, a("self"), a("mat2"), s),
    "aten::bmm": lambda c, a, s: product(c, a("self"), a("mat2"), s),
    "aten::addmm": lambda c, a, s: added_product(c, a, s, "mat1", "mat2"),
    "aten::baddbmm": lambda c, a, s: added_product(c, a, s, "batch1", "batch2"),
    "aten::_int_mm": lambda c, a, s: c.make("int_matmul", (a("self"), a("mat2")), None, s),
    # order and shape
    "aten::t": lambda c, a, s: c.permute(a("self"), list(reversed(range(len(s)))), s),
    "aten::numpy_T": lambda c, a, s: c.permute(a("self"), list(reversed(range(len(s)))), s),
    "aten::mT": lambda c, a, s: c.transpose(a("self"), -2, -1, s),
    "aten::transpose": lambda c, a, s: c.transpose(a("self"), a.get("dim0"), a.get("dim1"), s),
    "aten::permute": lambda c, a, s: c.permute(a("self"), a.get("dims"), s),
    "aten::expand": expanded,
    "aten::expand_as": expanded,
    "aten::unsqueeze": unsqueezed,
    "aten::squeeze": squeezed,
    # the same value
    "aten::clone": lambda c, a, s: a("self"),
    "aten::contiguous": lambda c, a, s: a("self"),
    "aten::alias": lambda c, a, s: a("self"),
    "aten::dropout": dropped,
    # casts
    "aten::to": same_device_cast,
    "aten::_to_copy": same_device_cast,
    "aten::type_as": same_device_cast,
    # numbers held in 0-d tensors
    "aten::full": lambda c, a, s: constant(c, a, s, "fill_value"),
    "aten::scalar_tensor": lambda c, a, s: constant(c, a, s, "s"),
    "aten::zeros_like": lambda c, a, s: c.filled(0.0, a, s),
    "aten::ones_like": lambda c, a, s: c.filled(1.0, a, s),
}
RULES |= composites.RULES | attention.RULES
ALIASES = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "concat": "cat",
}
for spelled, name in ALIASES.items():
    RULES[f"aten::{spelled}"] = RULES[f"aten::{name}"]


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)
