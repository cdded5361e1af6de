"""The arguments of an ATen call, by the names of the operator's schema.

Every rule reads a call through this file, whether it makes a canonical expression or an element of
a mask: positional and keyword arguments are one, and an argument that is left out is the schema's
default.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import fx

from fusion_backend.capture.sizes import hashable
from fusion_backend.compat.torch import OpOverload, schema_of

NO_DEFAULT = NotImplemented  # None is a default of many arguments
# Another name of an operator -> the name that has the rule.
SYNONYMS = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
}
SYNONYMS = {f"aten::{spelled}": f"aten::{name}" for spelled, name in SYNONYMS.items()}


class Argument(NamedTuple):
    """`position` counts the arguments of the schema; one that is keyword-only is never given by
    it.
    """

    position: int
    name: str
    default: object


@functools.lru_cache(4096)
def operator_name(op: OpOverload) -> str:
    """aten::add of aten::add.Tensor; of a synonym, the name that has the rule."""
    name = schema_of(op).name
    return SYNONYMS.get(name, name)


@functools.lru_cache(4096)
def arguments_of(op: OpOverload) -> dict[str, Argument]:
    """The arguments of an operator by name, in the order of its schema."""
    return {
        a.name: Argument(i, a.name, a.default_value if a.has_default_value() else NO_DEFAULT)
        for i, a in enumerate(schema_of(op).arguments)
    }


def given(node: fx.Node, argument: Argument):
    """An argument as the graph holds it: a node, a number, a list. The default where it is left
    out, None where there is none.
    """
    args = node.args
    if argument.position < len(args):
        return args[argument.position]
    found = node.kwargs.get(argument.name, argument.default)
    return None if found is NO_DEFAULT else found


def argument(node: fx.Node, name: str):
    """An argument as the graph holds it, by name; None if the operator has no such argument."""
    known = arguments_of(node.target).get(name)
    return None if known is None else given(node, known)


def known_value(value):
    """A node's fake value or symbolic number, in lists too; anything else as it is."""
    if isinstance(value, fx.Node):
        return value.meta.get("val", value)
    return [known_value(v) for v in value] if isinstance(value, (list, tuple)) else value


def written_arguments(node: fx.Node) -> tuple:
    """The arguments that distinguish a call besides its operands. A default that is written out
    makes no difference.
    """
    known = arguments_of(node.target)
    pairs = [*zip(known, node.args, strict=False), *sorted(node.kwargs.items())]
    parts = [(name, key_part(value), known[name].default) for name, value in pairs]
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


class Call:
    """One call of an operator: its result, and by name the values of its arguments."""

    __slots__ = ("node", "shape", "value")

    def __init__(self, node: fx.Node):
        self.node = node
        self.value = node.meta.get("val")  # the fake result, of several results a tuple
        # None where the result is no tensor
        self.shape = tuple(self.value.shape) if isinstance(self.value, torch.Tensor) else None

    @property
    def name(self) -> str:
        """The operator without its namespace: `add` of aten::add.Tensor."""
        return operator_name(self.node.target).partition("::")[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.value.dtype

    def __getitem__(self, name: str):
        """The fake value of an argument, or its number; None if there is no such argument."""
        return known_value(argument(self.node, name))
