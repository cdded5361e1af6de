"""Launches generated kernels: a program on rows, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import dense, dynamic, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import grid
from fusion_backend.kernels.generated.adjoint import columns_of
from fusion_backend.kernels.generated.program import Program
from fusion_backend.kernels.generated.text import (
    Place,
    Places,
    backward_kernel,
    forward_kernel,
)
from fusion_backend.reporting.reject import Reject

MAX_HELD = 4096  # elements of the longest row; of longer ones a backward spills registers
DIMENSIONS = 4


def place_of(t: Tensor, shape: tuple) -> Place:
    """Where a tensor that broadcasts to `shape`, `[..., n]`, lies. Raises ValueError where that
    depends on a size that is dynamic.
    """
    left_out = len(shape) - t.dim()
    full, its = padded(shape, 1), padded((1,) * left_out + tuple(t.shape), 1)
    strides = padded((0,) * left_out + t.stride(), 0)
    single = [statically_known_true(size == 1) for size in full]
    alone = [statically_known_true(size == 1) for size in its]
    equal = [statically_known_true(a == b) for a, b in zip(its, full, strict=True)]
    wide, tall = not alone[3] or single[3], not all(alone[:3])
    if all(equal[:3]) and tall and dense(t, range(t.dim())):
        return Place((0, 0, 0, int(wide)), dense=True, wide=wide)
    apart = [0 if no else number(s) for no, s in zip(alone, strides, strict=True)]
    apart[3] = 1 if single[3] else apart[3]
    sizes = tuple(map(number, full[1:3])) if any(apart[:3]) else (1, 1)
    if any(map(dynamic, (*apart, *sizes))):
        raise ValueError(f"the strides of shape {tuple(t.shape)}, {t.stride()}, are dynamic")
    return Place(tuple(apart), sizes, tall=tall, wide=wide)


def padded(each: tuple, with_: int) -> tuple:
    """One number for each of four dimensions. The missing ones follow the first, so that the kernel
    needs no size of the first one, which may be dynamic.
    """
    first = each[:-1][:1]
    return (*first, *(with_,) * (DIMENSIONS - len(each)), *each[len(first) :])


def places_of(given: Mapping[str, Tensor], shape: tuple) -> Places:
    return tuple((name, place_of(t, shape)) for name, t in given.items())


def shape_of(given: Mapping[str, Tensor]) -> tuple:
    """The shape of the result: that to which all tensors broadcast."""
    return tuple(map(number, torch.broadcast_shapes(*(t.shape for t in given.values()))))


def reject_places(program: Program, given: Mapping[str, Tensor]) -> Reject | None:
    """Refuse rows that a kernel cannot hold, tensors that are not known to lie somewhere, and sums
    over what is one number for a row.
    """
    try:
        shape = shape_of(given)
    except RuntimeError as error:
        return Reject(str(error))
    if not shape or len(shape) > DIMENSIONS:
        return Reject(f"the result has {len(shape)} dimensions; the kernel takes 1 to {DIMENSIONS}")
    if dynamic(shape[-1]):
        return Reject("the row length is dynamic")
    if not 1 <= shape[-1] <= MAX_HELD:
        return Reject(f"a row of {shape[-1]} is not between 1 and {MAX_HELD}")
    try:
        columns_of(program, {name: p.wide for name, p in places_of(given, shape)})
    except ValueError as error:
        return Reject(str(error))
    return None


def config(n: int, given: Mapping[str, Tensor]) -> dict:
    """2048 elements a program, or a row that is longer; 16 a thread, or 8 of fp32."""
    block = triton.next_power_of_2(n)
    rows = max(1, 2048 // block)
    each = 8 if any(t.itemsize == 4 for t in given.values()) else 16
    return dict(N=n, BLOCK=block, ROWS=rows, num_warps=rows * block // (32 * each))


def forward(program: str, given: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The result of a program on tensors by name, `[..., n]`, contiguous, in dtype. Grid: blocks of
    rows.
    """
    shape = shape_of(given)
    like = next(iter(given.values()))
    out = flat(shape, dtype, like.device)
    rows, options = math.prod(shape[:-1]), config(shape[-1], given)
    kernel = forward_kernel(program, places_of(given, shape))
    blocks = (rows + options["ROWS"] - 1) // options["ROWS"]
    launch(kernel, (blocks,), *given.values(), out, rows, **options)
    return shaped(out, shape)


def backward(
    program: str, d: Tensor, given: Mapping[str, Tensor], wanted: tuple[str, ...]
) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, in their dtypes and shapes, from that of the result, d.
    Grid: blocks of rows; two programs a multiprocessor where gradients are sums over rows.
    """
    shape = shape_of(given)
    places = places_of(given, shape)
    kernel, sums = backward_kernel(program, places, wanted)
    rows, n, options = math.prod(shape[:-1]), shape[-1], config(shape[-1], given)
    programs = grid(rows, options["ROWS"], 2 if sums.added else 0, d.device)
    place, found = dict(places), {}
    for name in sums.written:
        wide = n if place[name].wide else 1
        found[name] = torch.empty((*shape[:-1], wide), dtype=given[name].dtype, device=d.device)
    for name in sums.added:
        wide = n if place[name].wide else 1
        found[name] = torch.empty((programs, wide), dtype=torch.float32, device=d.device)
    counts = (rows, programs) if sums.added else (rows,)
    launch(
        kernel, (programs,), d.contiguous(), *given.values(), *found.values(), *counts, **options
    )
    for name in sums.written:
        found[name] = found[name].sum_to_size(given[name].shape)
    for name in sums.added:
        found[name] = found[name].sum(0).to(given[name].dtype).view(given[name].shape)
    return found
