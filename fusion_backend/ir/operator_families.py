"""Families of ATen operators with one meaning, and how their arguments are read. Both the rules of
graphs and those of masks use them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusion_backend.capture.sizes import equals
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.ir.schema_args import Call


def aten(*names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names)


# Each element equals that of the operand. `detach` is a different value in a graph, without a
# gradient.
SAME_VALUE = aten("clone", "contiguous", "alias")
CASTS = aten("to", "_to_copy", "type_as")
EXPANSIONS = aten("expand", "expand_as", "broadcast_to")
# The elements stay in their order.
RESHAPES = aten("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
PERMUTATIONS = aten("t", "numpy_T", "mT", "transpose", "swapaxes", "swapdims", "permute")
PERMUTATIONS += aten("movedim", "moveaxis")
SLICES = aten("slice", "narrow")
FILLED_LIKE = {"zeros_like": 0.0, "ones_like": 1.0}


def permutation(call: Call) -> list[int]:
    """The dimension of the operand for each dimension of the result."""
    rank = len(call.shape)
    order = list(range(rank))
    match call.name:
        case "permute":
            return [d % rank for d in call["dims"]]
        case "movedim" | "moveaxis":
            return moved_dimensions(rank, call["source"], call["destination"])
        case "transpose" | "swapdims":
            i, j = call["dim0"], call["dim1"]
        case "swapaxes":
            i, j = call["axis0"], call["axis1"]
        case "mT":
            i, j = -2, -1
        case _:
            return order[::-1]
    if rank:
        order[i], order[j] = order[j], order[i]
    return order


def moved_dimensions(rank: int, source: int | list[int], to: int | list[int]) -> list[int]:
    """The permutation that moves some dimensions to others; the rest keep their order."""
    if isinstance(source, int):
        source, to = [source], [to]
    moved = {j % rank: i % rank for i, j in zip(source, to, strict=True)}
    rest = iter([d for d in range(rank) if d not in moved.values()])
    return [moved[d] if d in moved else next(rest) for d in range(rank)]


class Slice(NamedTuple):
    """Elements start, start + step, ... before stop, of one dimension, counted from 0. Bounds that
    are symbolic may be negative, and then count from the end.
    """

    dim: int
    start: object
    stop: object
    step: object


def slice_of(call: Call) -> Slice | None:
    """The part that a slice or a narrow takes; None if it is not known at compile time."""
    shape = call["self"].shape
    if not shape:
        return None
    dim = call["dim"] % len(shape)
    size, start = shape[dim], call["start"]
    if isinstance(start, torch.Tensor):
        return None
    if call.name == "narrow":
        if statically_known_true(start < 0):  # counted from the end
            start = start + size
        elif not statically_known_true(start >= 0):
            return None
        return Slice(dim, start, start + call["length"], 1)
    stop = call["end"]
    stop = size if stop is None or equals(stop, 2**63 - 1) else stop
    bounds = (0 if start is None else start, stop)
    if all(isinstance(v, int) for v in (size, *bounds)):
        bounds = (max(v + size, 0) if v < 0 else min(v, size) for v in bounds)
    return Slice(dim, *bounds, call["step"])
