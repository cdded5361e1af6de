"""How a matrix product outside of a region reads a result of it: torch may copy the result first.

Inductor computes elementwise operators of the region while it makes the copy, so the copy belongs
to what is measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import hinted

FOLDED = {"aten::linear", "aten::matmul"}  # products that take more dimensions as rows


class Operand(NamedTuple):
    """A tensor as one batch of matrices: its dimensions in the order `order`, of which the first
    groups[0] become the batch, the next groups[1] the rows, and the last groups[2] the columns.
    """

    node: fx.Node
    order: tuple[int, ...]
    groups: tuple[int, int, int]

    def write(self, graph: fx.Graph, now: fx.Node) -> fx.Node:
        """The matrices, computed from the copy of the node that is in this graph."""
        sizes = hinted(self.node.meta["val"].shape)
        permuted = [sizes[i] for i in self.order]
        first, second, _ = self.groups
        groups = permuted[:first], permuted[first : first + second], permuted[first + second :]
        turned = graph.call_function(torch.ops.aten.permute.default, (now, list(self.order)))
        shape = [math.prod(group) for group in groups]
        return graph.call_function(torch.ops.aten.reshape.default, (turned, shape))


def copies(product: fx.Node, n: fx.Node, trained: set[fx.Node]) -> bool:
    """Does a product of the rows of n copy n first, because n does not lie in memory as one matrix?
    Only if the weight requires a gradient: with another weight torch multiplies the matrices of n
    one by one.
    """
    if not is_lowered(product) or name_of(product) not in FOLDED:
        return False
    left, weight = product.args[:2]
    if left is not n or weight not in trained or weight.meta["val"].dim() != 2:
        return False
    left = n.meta["val"]
    if left.dim() < 3:
        return False
    sizes, strides = hinted(left.shape), hinted(left.stride())
    if sizes is None or strides is None or 0 in sizes:
        return False
    return any(
        size > 1 and stride != strides[i + 1] * sizes[i + 1]
        for i, (size, stride) in enumerate(zip(sizes[:-2], strides[:-2], strict=True))
    )


def one_by_one(product: fx.Node, trained: set[fx.Node]) -> bool:
    """Would a product copy what it multiplies if its weight required a gradient?"""
    if not is_lowered(product) or name_of(product) not in FOLDED:
        return False
    left, weight = product.args[:2]
    return weight not in trained and copies(product, left, {weight})


def operand(product: fx.Node, n: fx.Node) -> Operand | None:
    """n as a product of batches reads it, or None. One with three dimensions is read as it is."""
    if not is_lowered(product) or n.meta["val"].dim() < 4 or hinted(n.meta["val"].shape) is None:
        return None
    if name_of(product) == "aten::matmul":
        return of_matmul(n, *product.args[:2])
    if name_of(product) == "aten::einsum":
        return of_einsum(n, *product.args[:2])
    return None


def of_matmul(n: fx.Node, left: fx.Node, right: fx.Node) -> Operand | None:
    """All dimensions but the last two are the batch. Expanded ones are left out."""
    shapes = [hinted(a.meta["val"].shape) for a in (left, right)]
    if None in shapes or shapes[0][:-2] != shapes[1][:-2]:
        return None
    dims = n.meta["val"].dim()
    return Operand(n, tuple(range(dims)), (dims - 2, 1, 1))


def of_einsum(n: fx.Node, equation: str, tensors: list[fx.Node]) -> Operand | None:
    """torch's order: the dimensions that both tensors and the result have, those of one tensor, and
    those that are summed over; the last two in turn for the second tensor.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or "." in equation or tensors[0] is tensors[1]:
        return None
    if any(len({*term}) != len(term) for term in terms):
        return None
    second = tensors[1] is n
    mine, other = terms[second], terms[not second]
    batch = [label for label in result if label in mine and label in other]
    own = [label for label in result if label in mine and label not in other]
    summed = sorted(label for label in mine if label not in result and label in other)
    if not summed or len(batch) + len(own) + len(summed) != len(mine):
        return None  # a product of elements, or summed over before the product
    sizes = [
        dict(zip(term, hinted(t.meta["val"].shape) or (), strict=False))
        for term, t in zip(terms, tensors, strict=True)
    ]
    if any(sizes[0].get(label) != sizes[1].get(label) for label in (*batch, *summed)):
        return None  # one of them is expanded
    groups = (batch, summed, own) if second else (batch, own, summed)
    order = tuple(mine.index(label) for group in groups for label in group)
    return Operand(n, order, tuple(map(len, groups)))
