"""Arguments that no node holds, but that are free views of a node, and how to write such a view
into a graph.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from fusion_backend.capture.sizes import hashable
from fusion_backend.compat.torch import aten
from fusion_backend.ir.expr import Expr

BY_NUMBERS = {"mul": aten.mul.Tensor, "div": aten.div.Tensor}
OF_COMPLEX = {"real": aten.real.default, "imag": aten.imag.default}


@dataclasses.dataclass(frozen=True)
class Viewed:
    """An argument that no node holds, but that is a free view of a node: a linear layer's weight,
    transposed, or a part of it.

    `steps` are canonical expressions' operators and attributes, from the node outwards: permute,
    half, slice, unsqueeze, unflatten (rows seen as more dimensions again); not, for the complement
    of a mask; real and imag, of complex numbers; mul and div by a node that is a number; times, of
    a small mask that is added more than once.
    """

    node: fx.Node
    steps: tuple[tuple[str, tuple], ...]

    @functools.cached_property
    def value(self) -> torch.Tensor:
        """The fake value."""
        value = self.node.meta["val"]
        for step in self.steps:
            target, rest = step_of(step, value)
            value = target(value, *map(value_of, rest))
        return value

    @functools.cached_property
    def kinds(self) -> tuple:
        """The steps, without the node that multiplies."""
        return tuple((op, () if op in BY_NUMBERS else attr) for op, attr in self.steps)


def step_of(step: tuple[str, tuple], value: torch.Tensor) -> tuple[object, tuple]:
    """The ATen operator of one step over a value, and its arguments after the first."""
    op, attr = step
    rank = value.dim()
    if op in BY_NUMBERS:
        return BY_NUMBERS[op], attr
    if op == "times":
        return aten.mul.Tensor, attr
    if op in OF_COMPLEX:
        return OF_COMPLEX[op], ()
    if op == "not":
        return aten.bitwise_not.default, ()
    if op == "permute":
        return aten.permute.default, (list(range(rank - len(attr))) + [d + rank for d in attr],)
    if op == "unflatten":
        return aten.unflatten.int, (0, list(attr))
    if op == "unsqueeze":
        return aten.unsqueeze.default, attr
    axis = attr[0] + rank
    if op == "half":
        middle = value.shape[axis] // 2
        return aten.slice.Tensor, (axis, *((middle, 2 * middle) if attr[1] else (0, middle)))
    return aten.slice.Tensor, (axis, *attr[1:])


def value_of(argument):
    """The fake value of an argument."""
    if isinstance(argument, Viewed):
        return argument.value
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def geometry(value) -> object:
    """The properties of a fake value that a shape rule can see, symbols included; a number as it
    is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, hashable(value.shape), hashable(value.stride())


def original(argument) -> torch.Tensor:
    """The fake value that an argument is, or is a view of: of the same dtype, device and kind of
    tensor.
    """
    return (argument.node if isinstance(argument, Viewed) else argument).meta["val"]


def unpermuted(g: Expr, order: tuple[int, ...]) -> Expr:
    """The value whose permutation g is; dimensions are counted from the right."""
    rank = len(order)
    return permuted(g, tuple(order.index(d) - rank for d in range(-rank, 0)))


def permuted(g: Expr, order: tuple[int, ...]) -> Expr:
    """The permutation of g; dimensions are counted from the right."""
    given = g.attr if g.op == "permute" else ()
    rank = max(len(order), len(given))
    order, given = ((*range(-rank, -len(o)), *o) for o in (order, given))
    combined = [given[d] for d in order]
    while combined and combined[0] == -len(combined):
        combined.pop(0)
    base = g.args[0] if g.op == "permute" else g
    return Expr("permute", (base,), tuple(combined), None, -1) if combined else base


def one_value(a: Expr, b: Expr) -> bool:
    """Are they one expression? `unpermuted` makes a new expression each time, which is in no
    table.
    """
    made = a.id == b.id == -1
    return a is b or (made and (a.op, a.attr, a.args) == (b.op, b.attr, b.args))
