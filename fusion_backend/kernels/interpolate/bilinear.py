"""Bilinear interpolation of images, and its gradient.

Row i of the output lies at row s = step · (i + ½) - ½ of the input, at least 0, or with corners
aligned at s = step · i: between the rows ⌊s⌋ and ⌊s⌋ + 1, which count 1 - (s - ⌊s⌋) and s - ⌊s⌋.
Columns likewise. The gradient is added up for each row of the input, and then for each
column, over the outputs that read it: nothing is written by two programs, and the sums have the
same bits every time. Tensors are contiguous, or channels-last; either is seen as `[outer, h, w,
inner]`, whose inner dimension is 1 or the channels. Computed in fp32; the gradient of the rows is
written in fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.compat.torch import suggest_memory_format
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch


class Tile(NamedTuple):
    """What a program computes: rows times columns; its warps."""

    rows: int
    columns: int
    warps: int


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


def seen_as(x: Tensor) -> tuple[int, int, int, int]:
    """The sizes of `[outer, h, w, inner]`."""
    n, c, h, w = map(number, x.shape)
    last = suggest_memory_format(x) == torch.channels_last
    return (n, h, w, c) if last else (n * c, h, w, 1)


def tile_of(rows: int, columns: int, elements: int = 2048) -> Tile:
    """Whole rows where they are short, 512 columns of longer ones; 512 elements a warp."""
    across = min(512, triton.next_power_of_2(columns))
    return Tile(max(1, elements // across), across, max(1, min(4, elements // 512)))


def forward(x: Tensor, target: str, how: Tile | None = None) -> Tensor:
    """The interpolated image `[n, c, height, width]`, in x's dtype and memory format.

    x is `[n, c, h, w]`, contiguous or channels-last, in fp32, bf16 or fp16. Grid: tiles of rows of
    all images and tiles of a row, or tiles of pixels of all images and tiles of their channels.
    """
    height, width, corners = target_of(target)
    outer, h, w, inner = seen_as(x)
    y = torch.empty(
        (*x.shape[:2], height, width),
        dtype=x.dtype, device=x.device, memory_format=suggest_memory_format(x),
    )  # fmt: skip
    steps = dict(DOWN=step(h, height, corners), ACROSS=step(w, width, corners), CORNERS=corners)
    sizes = dict(H=h, W=w, HEIGHT=height, WIDTH=width)
    if last := suggest_memory_format(x) == torch.channels_last:
        sizes["C"] = inner
    rows, columns = (outer * height * width, inner) if last else (outer * height, width)
    how = how or tile_of(rows, columns)
    launch(
        bilinear_rows_kernel if last else bilinear_kernel,
        (triton.cdiv(rows, how.rows), triton.cdiv(columns, how.columns)),
        x, y, outer, **steps, **sizes, ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
    )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, target: str, how: Tile | None = None) -> Tensor:
    """dx in the shape, dtype and memory format of x.

    dy `[n, c, height, width]` is copied where it has another memory format. Two launches: rows,
    then columns. Grid of each: tiles of what it writes.
    """
    height, width, corners = target_of(target)
    outer, h, w, inner = seen_as(x)
    dy = dy.contiguous(memory_format=suggest_memory_format(x))
    rows = torch.empty(outer, h, width, inner, dtype=torch.float32, device=dy.device)
    dx = torch.empty_like(x, memory_format=suggest_memory_format(x))
    add_up(dy, rows, outer, (height, h), width * inner, corners, how)
    add_up(rows, dx, outer * h, (width, w), inner, corners, how)
    return dx


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
    how = how or tile_of(outer * read, inner, 1024)
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
def rows_of(t, outer, H: tl.constexpr, ROWS: tl.constexpr):
    """Of tile number t of the rows of images `[outer, H]`: the first image, and of each row how
    many images further it lies, its number in it, and whether it exists.
    """
    start = tl.cast(t, tl.int64) * ROWS
    image = start // H
    row = (start - image * H).to(tl.int32) + tl.arange(0, ROWS)
    there = row < (tl.cast(outer, tl.int64) - image) * H
    return image, row // H, row % H, there


@triton.jit
def neighbours(i, STEP: tl.constexpr, READ: tl.constexpr, CORNERS: tl.constexpr):
    """The two inputs around output i, and the share of the second."""
    at = lies_at(i, STEP, CORNERS)
    before = tl.minimum(at.to(tl.int32), READ - 1)
    return before, tl.minimum(before + 1, READ - 1), at - before


@triton.jit
def between(X, first, second, low, right, left_at, right_at, keep):
    """Four pixels around each output, weighted: rows `first` and `second` of which the second
    counts `low`, columns `left_at` and `right_at` of which the second counts `right`.
    """
    above = tl.load(X + (first + left_at), keep, 0.0).to(tl.float32) * (1 - right)
    above += tl.load(X + (first + right_at), keep, 0.0).to(tl.float32) * right
    below = tl.load(X + (second + left_at), keep, 0.0).to(tl.float32) * (1 - right)
    below += tl.load(X + (second + right_at), keep, 0.0).to(tl.float32) * right
    return above * (1 - low) + below * low


# Bytes: x once, y once. Operations: about 10 an output. Rows of the result times their columns.
@triton.jit
def bilinear_kernel(
    X, Y, outer, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CORNERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, i, there = rows_of(tl.program_id(0), outer, HEIGHT, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = there[:, None] & (column < WIDTH)[None, :]
    top, below, low = neighbours(i, DOWN, H, CORNERS)
    left, next_to, right = neighbours(column, ACROSS, W, CORNERS)
    first, second = ((o * H + top) * W)[:, None], ((o * H + below) * W)[:, None]
    y = between(
        X + image * (H * W), first, second, low[:, None], right[None, :],
        left[None, :], next_to[None, :], keep,
    )  # fmt: skip
    at = ((o * HEIGHT + i) * WIDTH)[:, None] + column[None, :]
    tl.store(Y + image * (HEIGHT * WIDTH) + at, y, keep)


# The same, channels-last: pixels of the result times their channels.
@triton.jit
def bilinear_rows_kernel(
    X, Y, samples, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    CORNERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, pixel, there = rows_of(tl.program_id(0), samples, HEIGHT * WIDTH, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = there[:, None] & (channel < C)[None, :]
    top, below, low = neighbours(pixel // WIDTH, DOWN, H, CORNERS)
    left, next_to, right = neighbours(pixel % WIDTH, ACROSS, W, CORNERS)
    first, second = ((o * H + top) * (W * C))[:, None], ((o * H + below) * (W * C))[:, None]
    y = between(
        X + image * (H * W * C), first, second, low[:, None], right[:, None],
        (left * C)[:, None] + channel[None, :], (next_to * C)[:, None] + channel[None, :], keep,
    )  # fmt: skip
    at = ((o * (HEIGHT * WIDTH) + pixel) * C)[:, None] + channel[None, :]
    tl.store(Y + image * (HEIGHT * WIDTH * C) + at, y, keep)


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
        s = lies_at(output, STEP, CORNERS)
        before = tl.minimum(s.to(tl.int32), READ - 1)
        after = tl.minimum(before + 1, READ - 1)
        part = s - before
        weight = tl.where(before == i, 1 - part, 0.0) + tl.where(after == i, part, 0.0)
        reads = there & (output >= 0) & (output < WRITTEN) & (weight != 0)
        at = (o * WRITTEN + output)[:, None] * INNER + column[None, :]
        dy = tl.load(DY + at, reads[:, None] & across, 0.0).to(tl.float32)
        total += dy * weight[:, None]
    at = (o * READ + i)[:, None] * INNER + column[None, :]
    tl.store(DX + image * (READ * INNER) + at, total, there[:, None] & across)
