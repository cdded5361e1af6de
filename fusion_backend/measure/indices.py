"""Integers of a graph that may be indices, which decide what a region can compute itself."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import pytree

# Operators that read memory at an index whose range inputs.py knows: an index out of range stops
# the GPU for good. Any other operator that takes integers ends a region, unless it is elementwise.
GATHERING = {"aten::index", "aten::index_select", "aten::gather"}
INDEXING = GATHERING | {
    f"aten::{name}"
    for name in """
    embedding take take_along_dim cross_entropy_loss nll_loss nll_loss_nd nll_loss2d
    """.split()
}
# Every element of their result is an element of their first argument, or a number.
MOVING = {
    f"aten::{name}"
    for name in """
    view reshape _unsafe_view unsqueeze squeeze expand expand_as slice select
    permute transpose t mT swapaxes swapdims movedim moveaxis constant_pad_nd pad
    contiguous clone alias detach flatten unflatten _to_copy to split split_with_sizes chunk unbind
    """.split()
}


def tensors(n: fx.Node) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)]


def whole_numbers(value) -> bool:
    """Could it be an index? An index is neither bool nor int8, which is the dtype of quantized
    values.
    """
    if not isinstance(value, torch.Tensor):
        return False
    other = value.is_floating_point() or value.is_complex()
    return not other and value.dtype not in (torch.bool, torch.int8)


def is_index(n: fx.Node) -> bool:
    return whole_numbers(n.meta.get("val"))


def known_range(index: fx.Node, inside: set[fx.Node]) -> bool:
    """Are they an input of a region, at most moved, or computed from none of its inputs?"""
    while index in inside and (source := moved(index)) is not None and is_index(source):
        index = source
    pending, seen = [index] if index in inside else [], set()
    while pending:
        n = pending.pop()
        if n not in inside and tensors(n):
            return False
        if n not in seen and n in inside:
            seen.add(n)
            pending += n.all_input_nodes
    return True


def moved(n: fx.Node) -> fx.Node | None:
    """The operand whose elements an operator only moves; None for another operator."""
    moves = (is_lowered(n) and name_of(n) in MOVING) or n.target is operator.getitem
    return n.args[0] if moves else None
