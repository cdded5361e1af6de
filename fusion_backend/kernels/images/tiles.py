"""Tiles of images `[n, c, h, w]`, contiguous or channels-last.

Either is seen as `[outer, h, w, inner]`: a contiguous tensor as n · c images of one channel each,
with which a tile has rows of the images and columns of the images; a channels-last tensor as n
images of c channels, with which a tile has pixels and channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import dense, dynamic, memory, number, reject_dtypes
from fusion_backend.reporting.reject import Reject, Settled

MAX_SIDE, MAX_ROW, MAX_IMAGE = 1 << 15, 1 << 24, 1 << 29  # elements
MAX_TILE = 2048  # elements; a program counts those of all images of a tile in 32 bits


class Tile(NamedTuple):
    """What a program computes: rows times columns; its warps."""

    rows: int
    columns: int
    warps: int


class Images(NamedTuple):
    """How a tensor is seen, by the names of a kernel's constants but for outer."""

    outer: int
    H: int
    W: int
    C: int
    LAST: bool

    def constants(self) -> dict:
        return {name: value for name, value in self._asdict().items() if name != "outer"}

    def grid(self, how: Tile | None, elements: int = 2048) -> tuple[tuple[int, int], Tile]:
        """The programs, and the tile of each: `how`, or one of so many elements."""
        rows, columns = (self.outer * self.H, self.W)
        if self.LAST:
            rows, columns = self.outer * self.H * self.W, self.C
        how = how or tile_of(columns, elements)
        return (triton.cdiv(rows, how.rows), triton.cdiv(columns, how.columns)), how


def channels_last(x: Tensor) -> bool:
    """Is it channels-last in memory, and not contiguous? Adds no guard."""
    return not dense(x, range(4)) and dense(x, (0, 2, 3, 1))


def form_of(x: Tensor) -> torch.memory_format:
    return torch.channels_last if channels_last(x) else torch.contiguous_format


def images(x: Tensor) -> Images:
    n, c, h, w = map(number, x.shape)
    return Images(n, h, w, c, True) if channels_last(x) else Images(n * c, h, w, 1, False)


def tile_of(columns: int, elements: int) -> Tile:
    """Whole rows where they are short, 512 columns of longer ones; 512 elements a warp."""
    across = min(512, triton.next_power_of_2(columns))
    return Tile(max(1, elements // across), across, max(1, min(4, elements // 512)))


def reject_images(x: Tensor, height: int | None = None, width: int | None = None) -> Reject | None:
    """Refuse images that are neither contiguous nor channels-last, whose size is not a number, or
    that are too large, as they are or with another size.
    """
    if x.dim() != 4:
        return Reject(f"x has {x.dim()} dimensions, not 4")
    if (no := reject_dtypes(x=x)) or any(map(dynamic, x.shape[1:])):
        return no or Reject("the number of channels or the size of the images is dynamic")
    if not dense(x, range(4)) and not channels_last(x):
        return Reject(f"x is neither contiguous nor channels-last: {memory(x)}")
    _, h, w, c, last = images(x)
    height, width = height or h, width or w
    if max(h, w, height, width) > MAX_SIDE or c * max(w, width) > MAX_ROW:
        return Reject(f"a side of more than {MAX_SIDE}, or a row of more than {MAX_ROW} elements")
    size = c * max(h * w, height * width)
    if size > MAX_IMAGE:
        return Reject(f"an image of more than {MAX_IMAGE} elements")
    # rows of an image and columns, as the forward and the backward cut them, and the sums of rows
    cut = [(height * width, c), (h * w, c)] if last else [(height, width), (h, w)]
    for rows, columns in (*cut, (h, width * c)):
        if (rows_of_tile(columns) // rows + 2) * size >= 1 << 31:
            return Reject("the images of a tile have more elements than 32 bits count")


def lies_otherwise(convolution: str) -> Settled:
    """The region that the gate would measure has the layout of the graph."""
    return Settled(f"its images come from {convolution}, which Inductor computes channels-last")


def rows_of_tile(columns: int) -> int:
    """As many as a tile has at most."""
    return max(1, MAX_TILE // min(512, triton.next_power_of_2(columns)))


@triton.jit
def rows_of(t, outer, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Of tile number t of rows `[outer, COUNT]`: the first image, and of each row how many images
    further it lies, its number in it, and whether it exists.
    """
    start = tl.cast(t, tl.int64) * ROWS
    image = start // COUNT
    row = (start - image * COUNT).to(tl.int32) + tl.arange(0, ROWS)
    there = row < (tl.cast(outer, tl.int64) - image) * COUNT
    return image, row // COUNT, row % COUNT, there


@triton.jit
def places(
    outer, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of this program: the first image, and of its elements how many images further they lie, row,
    column and channel of each, to be broadcast, and which of them exist.
    """
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    if LAST:
        image, o, pixel, there = rows_of(tl.program_id(0), outer, H * W, ROWS)
        i, j, c = (pixel // W)[:, None], (pixel % W)[:, None], column
        keep = there[:, None] & (c < C)
    else:
        image, o, row, there = rows_of(tl.program_id(0), outer, H, ROWS)
        i, j, c = row[:, None], column, 0
        keep = there[:, None] & (j < W)
    return image, o[:, None], i, j, c, keep
