"""Bilinear interpolation of images, and its gradient.

Row i of the output lies at row s = step · (i + ½) - ½ of the input, at least 0, or with corners
aligned at s = step · i: between the rows ⌊s⌋ and ⌊s⌋ + 1, but no further than the last, weighted by
1 - (s - ⌊s⌋) and s - ⌊s⌋. Columns likewise. The gradient is added up for each row of the input, and
then for each column, over the outputs that read it: nothing is written by two programs, and the
sums have the same bits every time. Computed in fp32, in which the sums of the rows are written,
too. What has no weight is not read: a NaN of the gradient stays where it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.images.tiles import (
    Tile,
    form_of,
    images,
    places,
    rows_of,
    tile_of,
)


class Target(NamedTuple):
    """The size of the result, and whether the corners of both images are the same points."""

    height: int
    width: int
    corners: bool


def target_of(text: str) -> Target:
    """Read from "512,512", or "512,512 align_corners"."""
    size, *corners = text.split()
    height, width = map(int, size.split(","))
    return Target(height, width, bool(corners))


def step(read: int, written: int, corners: bool) -> float:
    """How far two neighbours of the result are apart in the input."""
    if corners:
        return (read - 1) / (written - 1) if written > 1 else 0.0
    return read / written


def backward_tile(inner: int) -> Tile:
    """One row with a warp where rows are long, and of columns as many as 4 warps have lanes."""
    if inner == 1:
        return Tile(512, 1, 4)
    return Tile(1, 512, 1) if inner >= 512 else tile_of(inner, 1024)


def forward(x: Tensor, target: str, how: Tile | None = None) -> Tensor:
    """The interpolated image `[n, c, height, width]`, in x's dtype and memory format.

    x is `[n, c, h, w]`, contiguous or channels-last, in fp32, bf16 or fp16. Grid: tiles of y.
    """
    height, width, corners = target_of(target)
    shape = (*x.shape[:2], height, width)
    y = flat(shape, x.dtype, x.device)
    read, written = images(x), images(x)._replace(H=height, W=width)
    grid, how = written.grid(how)
    launch(
        bilinear_kernel, grid, x, y, read.outer, HEIGHT=read.H, WIDTH=read.W,
        DOWN=step(read.H, height, corners), ACROSS=step(read.W, width, corners), CORNERS=corners,
        **written.constants(), ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
    )  # fmt: skip
    return shaped(y, shape, form_of(x))


def backward(dy: Tensor, x: Tensor, target: str, how: Tile | None = None) -> Tensor:
    """dx in the shape, dtype and memory format of x.

    dy `[n, c, height, width]` is copied where it has another memory format. Two launches: rows,
    then columns. Grid of each: tiles of what it writes.
    """
    height, width, corners = target_of(target)
    outer, h, w, inner, _ = images(x)
    dy = dy.contiguous(memory_format=form_of(x))
    rows = torch.empty(outer, h, width, inner, dtype=torch.float32, device=dy.device)
    dx = flat(x.shape, x.dtype, x.device)
    add_up(dy, rows, outer, (height, h), width * inner, corners, how)
    add_up(rows, dx, outer * h, (width, w), inner, corners, how)
    return shaped(dx, x.shape, form_of(x))


def add_up(
    dy: Tensor,
    dx: Tensor,
    outer: int,
    sizes: tuple[int, int],
    inner: int,
    corners: bool,
    how: Tile | None,
) -> None:
    """The gradient along one dimension: dy seen as `[outer, sizes[0], inner]`, dx as `[outer,
    sizes[1], inner]`.
    """
    written, read = sizes
    apart = step(read, written, corners)
    terms = written if apart == 0 else min(written, math.ceil(2 / apart) + 3)
    how = how or backward_tile(inner)
    launch(
        bilinear_backward_kernel,
        (triton.cdiv(outer * read, how.rows), triton.cdiv(inner, how.columns)),
        dy, dx, outer, STEP=apart, READ=read, WRITTEN=written, INNER=inner, TERMS=terms,
        CORNERS=corners, ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
    )  # fmt: skip


@triton.jit
def lies_at(i, STEP: tl.constexpr, CORNERS: tl.constexpr):
    """Where output i lies in the input."""
    if CORNERS:
        return STEP * i.to(tl.float32)
    return tl.maximum(STEP * (i.to(tl.float32) + 0.5) - 0.5, 0.0)


@triton.jit
def neighbours(i, STEP: tl.constexpr, READ: tl.constexpr, CORNERS: tl.constexpr):
    """The two inputs around output i, and the share of the second."""
    at = lies_at(i, STEP, CORNERS)
    before = tl.minimum(at.to(tl.int32), READ - 1)
    return before, tl.minimum(before + 1, READ - 1), at - before


# Bytes: x once, y once. Operations: about 10 an output. H and W are those of y.
@triton.jit
def bilinear_kernel(
    X, Y, outer, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, CORNERS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, i, j, c, keep = places(outer, H, W, C, LAST, ROWS, COLUMNS)
    top, below, low = neighbours(i, DOWN, HEIGHT, CORNERS)
    left, next_to, right = neighbours(j, ACROSS, WIDTH, CORNERS)
    X += image * (HEIGHT * WIDTH * C)
    top, below = (o * HEIGHT + top) * (WIDTH * C), (o * HEIGHT + below) * (WIDTH * C)
    left, next_to = left * C + c, next_to * C + c
    y = tl.load(X + (top + left), keep, 0.0).to(tl.float32) * (1 - right)
    y += tl.load(X + (top + next_to), keep, 0.0).to(tl.float32) * right
    second = tl.load(X + (below + left), keep, 0.0).to(tl.float32) * (1 - right)
    second += tl.load(X + (below + next_to), keep, 0.0).to(tl.float32) * right
    at = ((o * H + i) * W + j) * C + c
    tl.store(Y + image * (H * W * C) + at, y * (1 - low) + second * low, keep)


# Bytes: dy once, dx once. An element of dy is read by the two elements of dx beside it.
@triton.jit
def bilinear_backward_kernel(
    DY, DX, outer, STEP: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr,
    INNER: tl.constexpr, TERMS: tl.constexpr, CORNERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, i, there = rows_of(tl.program_id(0), outer, READ, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    across = (column < INNER)[None, :]
    # the outputs that lie between i - 1 and i + 1, and some beside them
    if TERMS == WRITTEN:
        first = i * 0
    elif CORNERS:
        first = tl.floor((i - 1).to(tl.float32) / STEP).to(tl.int32)
    else:
        first = tl.floor((i - 0.5) / STEP - 0.5).to(tl.int32)
    DY += image * (WRITTEN * INNER)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(TERMS):
        output = first + k
        before, after, part = neighbours(output, STEP, READ, CORNERS)
        weight = tl.where(before == i, 1 - part, 0.0) + tl.where(after == i, part, 0.0)
        reads = there & (output >= 0) & (output < WRITTEN) & (weight != 0)
        at = ((o * WRITTEN + output) * INNER)[:, None] + column[None, :]
        dy = tl.load(DY + at, reads[:, None] & across, 0.0).to(tl.float32)
        total += dy * weight[:, None]
    at = ((o * READ + i) * INNER)[:, None] + column[None, :]
    tl.store(DX + image * (READ * INNER) + at, total, there[:, None] & across)
