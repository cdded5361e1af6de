"""A call in a trace as the texts of wordings.py and changes.py see it: what their fields and
conditions may ask.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.compat.torch import OpOverload, schema_of

# What these give may be their argument, or share its memory: it is not for others to write over.
MAY_ALIAS = {"to", "contiguous", "reshape", "dropout", "flatten", "getitem", "type_as"}


def fitting(texts, call: Call) -> list[str]:
    """The texts whose conditions hold."""
    pairs = [(t, None) if isinstance(t, str) else t for t in texts]
    return [text for text, when in pairs if when is None or when(call)]


class Fields(dict):
    """What the fields of a text stand for."""

    def __init__(self, author, call: Call, text: str):
        super().__init__()
        self.author, self.call = author, call
        fields = [f for _, f, _, _ in string.Formatter().parse(text) if f]
        self.repeated = {f for f in fields if fields.count(f) > 1}

    def __missing__(self, key: str):
        if key in ("t", "u"):
            value: object = next(self.author.names)
        elif key == "x":
            value = self.author.named(self.call.node)
        else:
            value = getattr(self.call, key)
        if isinstance(value, Call) and any(f.split(".")[0] == key for f in self.repeated):
            value.keep = True
        self[key] = value
        return value


class Call:
    """A call in the trace as texts and conditions see it: its arguments by their schema names, and
    what it gives.
    """

    def __init__(self, author, node: fx.Node):
        self.author, self.node, self.keep = author, node, False
        if node.op == "placeholder":
            self.name, self.arguments = "input", {}
        elif isinstance(node.target, OpOverload):
            schema = schema_of(node.target)
            self.name = schema.name.removeprefix("aten::")
            defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            given = dict(zip([a.name for a in schema.arguments], node.args, strict=False))
            self.arguments = defaults | given | dict(node.kwargs)
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
            return Call(self.author, value)
        return literal(value, self.author)

    def __format__(self, spec: str) -> str:
        return self.author.named(self.node) if spec or self.keep else self.author.written(self.node)

    def default(self) -> str:
        if self.name == "getitem":
            return f"{self.author.named(self.node.args[0])}[{self.node.args[1]}]"
        args = [code(literal(a, self.author)) for a in self.node.args]
        args += [f"{k}={code(literal(v, self.author))}" for k, v in self.node.kwargs.items()]
        return f"torch.ops.{str(self.node.target).replace('::', '.')}({', '.join(args)})"


class Listed(list):
    def __format__(self, spec: str) -> str:
        return f"[{', '.join(map(code, self))}]"


def literal(value, author):
    """An argument as it is written; numbers stay numbers, for conditions."""
    if isinstance(value, fx.Node):
        return Call(author, value)
    if isinstance(value, (list, tuple)):
        return Listed(literal(v, author) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return Infinite(value)
    return value


class Infinite(float):
    def __format__(self, spec: str) -> str:
        return f'float("{float(self)}")'


def code(value) -> str:
    return format(value) if isinstance(value,
        (Call, Listed, float)) else f"torch.{value!r}" if isinstance(
        value, torch.device) else repr(value)  # fmt: skip


def dims_of(a: Call) -> tuple[int, ...] | None:
    """The reduced dimensions; from one side or the other."""
    if not isinstance(a.self, Call) or not a.self.rank:
        return None
    dims = a.arguments.get("dim")
    dims = range(a.self.rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    shift = a.self.rank if a.author.draw.random() < 0.3 else 0
    return tuple(d % a.self.rank - a.self.rank + shift for d in dims)


def one(dims: tuple | None) -> int | None:
    return dims[0] if dims is not None and len(dims) == 1 else None


def fresh(a: Call) -> bool:
    """Made here and read once: it may be written over."""
    if a.node.op != "call_function" or len(a.node.users) != 1 or a.name in MAY_ALIAS:
        return False
    return not any(r.alias_info for r in schema_of(a.node.target).returns)


def value(a: Call) -> torch.Tensor:
    return a.node.meta["val"]


def sibling(a: Call) -> Call | None:
    """Another product of the same value by a weight of the same shape."""
    x, w = a.node.args[:2]
    for n in x.users:
        alike = n is not a.node and n.target is a.node.target and n.args[0] is x
        if (
            alike
            and w.meta["val"].dim() == 2
            and n.args[1].meta["val"].shape == w.meta["val"].shape
        ):
            return Call(a.author, n)
    return None


def pair_of(a: Call) -> tuple:
    tensors = a.tensors
    return tuple(tensors) if isinstance(tensors, Listed) and len(tensors) == 2 else (None, None)


# What conditions and texts may ask of a call beside its arguments.
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
    "unroot": lambda a: 1 / a.root,
    "n": lambda a: math.prod(a.self.shape[d] for d in dims_of(a)),
    "inverse": lambda a: 1 / a.other,
    "reciprocal": lambda a: a.author.base.pattern.reciprocal,
    "groups": lambda a: a.query.shape[-3] // a.key.shape[-3],
    "root": lambda a: 1 / math.sqrt(a.query.shape[-1]) if a.scale is None else a.scale,
}
