"""Finds whether an index `[n, m]` is a function of i - j alone, and so one number along each
diagonal.

Element (i, j) is read as a term (reader.py): if its indices contain i and j only as i - j, so does
the element, whatever is read there. An operator without a rule is looked through if it is
elementwise, also on floats: from equal numbers it makes equal numbers, wherever they are. So sizes
may be symbolic, and logarithms may round in any way. Other values are computed on CPU, unless an
input or a rounding decides them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import schema_of
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.ir.canonicalize import unrepeatable
from fusion_backend.masks.analysis import Masks, location_of, source
from fusion_backend.masks.reader import INTEGERS, Reader, dtype_of, is_one
from fusion_backend.masks.terms import ZERO, Linear, Term

# Elementwise, but made of operators that carry the tag.
MADE_OF = (
    "to",
    "_to_copy",
    "type_as",
    "floor_divide",
    "multiply",
    "subtract",
    "divide",
    "negative",
    "absolute",
)
MADE_OF = {f"aten::{name}" for name in MADE_OF}


@dataclasses.dataclass(frozen=True)
class Index:
    """`diagonal`: is it known to be a function of i - j alone? `text`: where that is proven, or
    what it reads.
    """

    diagonal: bool
    text: str


def index_of(argument: fx.Node | Viewed, masks: Masks) -> Index:
    """What is known of an index `[n, m]`, with any dimensions of size 1 in front."""
    if isinstance(argument, Viewed):
        return Index(False, f"its index is a view of {source(argument.node)}")
    shape = argument.meta["val"].shape
    if len(shape) < 2 or not all(is_one(size) for size in shape[:-2]):
        return Index(False, f"its index has the shape {tuple(shape)}, not [n, m]")
    reads = other_read(argument, masks)
    if reads is None:
        return Index(True, f"its index is a function of i - j, proven at {location_of(argument)}")
    values = masks.values
    if values.exactly(argument) is not None and values.by_difference(argument) is not None:
        return Index(
            True, f"its index is a function of i - j, by its values at {location_of(argument)}"
        )
    return Index(
        False, f"its index is not known to be a function of i - j: it reads {source(reads)}"
    )


def other_read(index: fx.Node, masks: Masks) -> fx.Node | None:
    """A node whose element for (i, j) is read at indices that depend on more than i - j; None if
    there is none.
    """
    shape = index.meta["val"].shape
    reader = Reader({"i": shape[-2], "j": shape[-1]}, masks.unknown)
    at = (*(ZERO for _ in shape[:-2]), Linear({"i": 1}), Linear({"j": 1}))
    pending, seen = [(index, reader.element(index, at))], set()
    while pending:
        by, t = pending.pop()
        if t in seen or not isinstance(t, (Term, Linear)):
            continue
        seen.add(t)
        if isinstance(t, Linear):
            if not of_difference(t):
                return by
        elif t.op != "read":
            pending += (
                [(by, x) for x in t.args]
                if t.op != "same"
                else [(t.args[0], x) for x in t.args[1] + t.args[2]]
            )
        elif not all(map(of_difference, t.args[1])):
            node, indices = t.args
            operands = elementwise(node, masks)
            if operands is None:
                return node
            pending += [(node, reader.operand(a, indices)) for a in operands]
    return None


def of_difference(form: Linear) -> bool:
    """Is it a function of i - j, or a number?"""
    return not form.terms or (set(form.terms) == {"i", "j"} and form.terms["i"] == -form.terms["j"])


def elementwise(n: fx.Node, masks: Masks) -> list[fx.Node] | None:
    """The tensors from whose elements at the same indices, and from no others, n computes each
    element; None if n is not elementwise.
    """
    if not is_lowered(n) or masks.unknown(n) or unrepeatable(n):
        return None
    if schema_of(n.target).name == "aten::index":  # of a whole table: a function of its indices
        whole = len(n.args[1]) == n.args[0].meta["val"].dim() and all(
            dtype_of(i) in INTEGERS for i in n.args[1]
        )
        return list(n.args[1]) if whole else None
    if torch.Tag.pointwise not in n.target.tags and schema_of(n.target).name not in MADE_OF:
        return None
    return [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
