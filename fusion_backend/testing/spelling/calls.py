"""A call in a trace, as the texts of wordings.py and changes.py see it: the values that their
fields and conditions may use.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.compat.torch import OpOverload, schema_of

# The results of these may be their argument, or share its memory: they may not be overwritten.
MAY_ALIAS = {"to", "contiguous", "reshape", "dropout", "flatten", "getitem", "type_as"}


def applicable(texts, call: Call) -> list[str]:
    """The texts whose conditions hold for a call."""
    pairs = [(t, None) if isinstance(t, str) else t for t in texts]
    return [text for text, when in pairs if when is None or when(call)]


class Fields(dict):
    """The values of a text's fields, computed when `format_map` asks for them. A value that the
    text mentions twice is put into a variable.
    """

    def __init__(self, writer, call: Call, text: str):
        super().__init__()
        self.writer, self.call = writer, call
        fields = [f for _, f, _, _ in string.Formatter().parse(text) if f]
        self.repeated = {f for f in fields if fields.count(f) > 1}

    def __missing__(self, key: str):
        if key in ("t", "u"):
            value: object = next(self.writer.names)
        elif key == "x":
            value = self.writer.variable(self.call.node)
        else:
            value = getattr(self.call, key)
        if isinstance(value, Call) and any(f.split(".")[0] == key for f in self.repeated):
            value.in_variable = True
        self[key] = value
        return value


class Call:
    """A call in the trace. Its attributes are its arguments, by their schema names, and DERIVED; an
    attribute that it does not have is None.
    """

    def __init__(self, writer, node: fx.Node):
        self.writer, self.node, self.in_variable = writer, node, False
        if node.op == "placeholder":
            self.name, self.arguments = "input", {}
        elif isinstance(node.target, OpOverload):
            schema = schema_of(node.target)
            self.name = schema.name.removeprefix("aten::")
            defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            positional = dict(zip([a.name for a in schema.arguments], node.args, strict=False))
            self.arguments = defaults | positional | dict(node.kwargs)
        else:
            self.name, self.arguments = (
                "getitem",
                dict(zip(("self", "index"), node.args, strict=True)),
            )

    def __eq__(self, other) -> bool:
        return isinstance(other, Call) and other.node is self.node

    def __hash__(self):
        return hash(self.node)

    def __getattr__(self, name: str):
        if name not in self.arguments:
            return DERIVED[name](self) if name in DERIVED else None
        value = self.arguments[name]
        if isinstance(value, fx.Node):
            return Call(self.writer, value)
        return literal(value, self.writer)

    def __format__(self, spec: str) -> str:
        return (
            self.writer.variable(self.node)
            if spec or self.in_variable
            else self.writer.expression(self.node)
        )

    def default(self) -> str:
        if self.name == "getitem":
            return f"{self.writer.variable(self.node.args[0])}[{self.node.args[1]}]"
        args = [code(literal(a, self.writer)) for a in self.node.args]
        args += [f"{k}={code(literal(v, self.writer))}" for k, v in self.node.kwargs.items()]
        return f"torch.ops.{str(self.node.target).replace('::', '.')}({', '.join(args)})"


class ListLiteral(list):
    """A list that formats as source."""

    def __format__(self, spec: str) -> str:
        return f"[{', '.join(map(code, self))}]"


def literal(value, writer):
    """An argument as it is written; numbers stay numbers, for conditions."""
    if isinstance(value, fx.Node):
        return Call(writer, value)
    if isinstance(value, (list, tuple)):
        return ListLiteral(literal(v, writer) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return InfiniteLiteral(value)
    return value


class InfiniteLiteral(float):
    """An infinity or NaN, which formats as source."""

    def __format__(self, spec: str) -> str:
        return f'float("{float(self)}")'


def code(value) -> str:
    """Python source of a literal."""
    if isinstance(value, (Call, ListLiteral, float)):
        return format(value)
    return f"torch.{value!r}" if isinstance(value, torch.device) else repr(value)


def dims_of(a: Call) -> tuple[int, ...] | None:
    """The reduced dimensions, counted from the left or from the right at random."""
    if not isinstance(a.self, Call) or not a.self.rank:
        return None
    dims = a.arguments.get("dim")
    dims = range(a.self.rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    shift = a.self.rank if a.writer.draw.random() < 0.3 else 0
    return tuple(d % a.self.rank - a.self.rank + shift for d in dims)


def one(dims: tuple | None) -> int | None:
    return dims[0] if dims is not None and len(dims) == 1 else None


def fresh(a: Call) -> bool:
    """Is it in memory of its own and read once, so that it may be overwritten?"""
    if a.node.op != "call_function" or len(a.node.users) != 1 or a.name in MAY_ALIAS:
        return False
    return not any(r.alias_info for r in schema_of(a.node.target).returns)


def value(a: Call) -> torch.Tensor:
    return a.node.meta["val"]


def sibling(a: Call) -> Call | None:
    """Another product of the same value and a weight of the same shape."""
    x, w = a.node.args[:2]
    for n in x.users:
        alike = n is not a.node and n.target is a.node.target and n.args[0] is x
        if (
            alike
            and w.meta["val"].dim() == 2
            and n.args[1].meta["val"].shape == w.meta["val"].shape
        ):
            return Call(a.writer, n)
    return None


def pair_of(a: Call) -> tuple:
    tensors = a.tensors
    return (
        tuple(tensors) if isinstance(tensors, ListLiteral) and len(tensors) == 2 else (None, None)
    )


# The attributes of a call besides its arguments.
DERIVED: dict[str, Callable] = {
    "rank": lambda a: value(a).dim(),
    "shape": lambda a: list(value(a).shape),
    "type": lambda a: value(a).dtype,
    "floating": lambda a: value(a).is_floating_point(),
    "contiguous": lambda a: value(a).is_contiguous(),
    "single": lambda a: len(a.node.users) == 1,
    "fresh": fresh,
    "axes": dims_of,
    "axis": lambda a: one(dims_of(a)),
    "other_axis": lambda a: (
        one(dims_of(a)) % a.self.rank - 1 if one(dims_of(a)) is not None else None
    ),
    "outer": lambda a: -2 if a.input.rank > 1 else -1,
    "sibling": sibling,
    "first": lambda a: pair_of(a)[0],
    "second": lambda a: pair_of(a)[1],
    "how": lambda a: ("none", "mean", "sum")[a.reduction],
    "keepdim": lambda a: False,  # of a reduction of everything
    "unroot": lambda a: 1 / a.root,
    "n": lambda a: math.prod(a.self.shape[d] for d in dims_of(a)),
    "inverse": lambda a: 1 / a.other,
    "reciprocal": lambda a: a.writer.form.pattern.reciprocal,
    "groups": lambda a: a.query.shape[-3] // a.key.shape[-3],
    "root": lambda a: 1 / math.sqrt(a.query.shape[-1]) if a.scale is None else a.scale,
}
