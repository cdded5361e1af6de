"""Batch normalisation in training, of a tensor whose channels are adjacent in memory: rows of c
channels, one for each position of each sample.

With mean and var those of a channel over all rows and rstd = 1 / sqrt(var + eps): z = (x - mean) ·
rstd · weight + bias + residual, y = act(z). A program has a block of columns and walks through
tiles of rows; what it finds of them is merged in order by a second kernel: the same bits every
time. A third kernel reads everything again, its end first, which may still lie in the L2. All sums
are in fp32. batch_norm_backward.py has the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.inputs import dense, dynamic, memory, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.norm.group_norm_rows import (
    block_of_channels,
    channels_last,
    of_lanes,
    with_row,
)
from fusion_backend.reporting.reject import Reject

MAX_ROWS = (1 << 31) - 256  # their tiles are counted with 32 bits


class Columns(NamedTuple):
    """How the rows are divided: blocks of `block` columns, `across` of them, in tiles of `rows`
    rows; `pieces` programs for each block of columns, which take turns with the tiles.
    """

    block: int
    rows: int
    across: int
    pieces: int
    warps: int

    @property
    def constants(self) -> dict:
        return dict(
            BLOCK=self.block, ROWS=self.rows, ACROSS=self.across, PIECES=self.pieces,
            num_warps=self.warps,
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int]:
        return (self.pieces * self.across,)


def columns_of(x: Tensor, elements: int = 2048, warps: int = 2, programs: int = 4) -> Columns:
    """Tiles of so many elements, and so many programs for each multiprocessor."""
    c = number(x.shape[1])
    block = block_of_channels(c)
    across = triton.cdiv(c, block)
    pieces = triton.cdiv(programs * multiprocessors(x.device), across)
    return Columns(block, min(128, max(1, elements // block)), across, pieces, warps)


def rows_of(x: Tensor) -> int:
    """How many numbers of a channel there are in x `[b, c, ...]`."""
    return x.numel() // number(x.shape[1])


def reject_layout(x: Tensor) -> Reject | None:
    """Refuse a dynamic number of channels, channels that are not adjacent in memory, and more
    rows than the kernels count.
    """
    if dynamic(x.shape[1]):
        return Reject("the number of channels is dynamic")
    if not (channels_last(x) or x.dim() == 2 and dense(x, range(2))):
        return Reject(f"the channels of x are not adjacent in memory: {memory(x)}")
    if statically_known_true(rows_of(x) > MAX_ROWS):
        return Reject(f"{rows_of(x)} numbers of a channel are more than {MAX_ROWS}")
    return None


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    act: str, columns: Columns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y `[b, c, ...]`, in memory as x is and of its dtype, and mean and var `[c]`, which is not
    corrected, in fp32.

    x is `[b, c, ...]` in fp32, bf16 or fp16, its channels adjacent in memory; residual, if any, is
    like x, weight and bias are `[c]`, contiguous, of any of these dtypes. act is a word of
    common/activations.py. Grids: those of `statistics`; pieces by blocks of columns.
    """
    c, rows, columns = number(x.shape[1]), rows_of(x), columns or columns_of(x)
    y = torch.empty_like(x)
    mean, var = statistics(x, columns)
    launch(
        batch_norm_kernel, columns.grid, x, residual, weight, bias, mean, var, y, rows, eps,
        C=c, ACT=act, **columns.constants,
    )  # fmt: skip
    return y, mean, var


def statistics(x: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """mean and var `[c]` of each channel, in fp32. Grids: as the columns; blocks of 32 channels."""
    c, rows = number(x.shape[1]), rows_of(x)
    moments = torch.empty((2, columns.pieces, c), dtype=torch.float32, device=x.device)
    mean, var = (torch.empty(c, dtype=torch.float32, device=x.device) for _ in range(2))
    launch(batch_moments_kernel, columns.grid, x, moments, rows, C=c, **columns.constants)
    launch(
        merge_batch_moments_kernel, (triton.cdiv(c, 32),), moments, mean, var, rows, C=c,
        ROWS=columns.rows, PIECES=columns.pieces, COLS=32, PARTS=64, num_warps=4,
    )  # fmt: skip
    return mean, var


@triton.jit
def tile_of_batch(
    t, column, rows, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Tile number t in a block of columns: where its elements are, and which of them exist."""
    row, ch = tl.arange(0, ROWS)[:, None], (column * BLOCK + tl.arange(0, BLOCK))[None, :]
    first = tl.cast(t, tl.int64) * ROWS
    return first * C + (row * C + ch), (row < rows - first) & (ch < C)


# Bytes: x once, 8 a piece and channel.
@triton.jit
def batch_moments_kernel(
    X, MOMENTS, rows, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    means = tl.zeros([ROWS, BLOCK], tl.float32)  # Welford's, in each lane
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for t in tl.range(piece, tl.cdiv(rows, ROWS), PIECES, num_stages=3):
        at, keep = tile_of_batch(t, column, rows, C, BLOCK, ROWS)
        x = tl.load(X + at, keep, 0.0).to(tl.float32)
        means, squares = with_row(means, squares, x, keep, t // PIECES + 1)
    # in how many tiles of the piece each lane has a row
    seen = tl.cdiv(rows - tl.arange(0, ROWS), ROWS) - piece
    seen = tl.cdiv(tl.maximum(seen, 0), PIECES).to(tl.float32)[:, None]
    mean, squares = of_lanes(means, squares, seen, tl.maximum(tl.sum(seen, 0), 1.0))
    ch = column * BLOCK + tl.arange(0, BLOCK)
    tl.store(MOMENTS + piece * C + ch, mean, ch < C)
    tl.store(MOMENTS + (PIECES + piece) * C + ch, squares, ch < C)


@triton.jit
def rows_of_pieces(piece, rows, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """How many rows the pieces have. The last tile may be smaller than the others."""
    tiles = tl.cdiv(rows, ROWS)
    own = tl.cdiv(tl.maximum(tiles - piece, 0), PIECES)
    last = (tiles - 1) % PIECES == piece
    return (own * ROWS - tl.where(last, tiles * ROWS - rows, 0)).to(tl.float32)


# Bytes: 8 a piece and channel, 8 a channel. Few, so that they are read twice: for the mean, and for
# the distances from it.
@triton.jit
def merge_batch_moments_kernel(
    MOMENTS, MEAN, VAR, rows, C: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    ch = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    total = tl.zeros([PARTS, COLS], tl.float32)
    for start in tl.range(0, PIECES, PARTS):
        piece = start + tl.arange(0, PARTS)[:, None]
        keep = (piece < PIECES) & (ch < C)
        count = rows_of_pieces(piece, rows, ROWS, PIECES)
        total += tl.load(MOMENTS + piece * C + ch, keep, 0.0) * count
    mean = tl.sum(total, 0, keep_dims=True) / rows
    total = tl.zeros([PARTS, COLS], tl.float32)
    squares = tl.zeros([PARTS, COLS], tl.float32)
    for start in tl.range(0, PIECES, PARTS):
        piece = start + tl.arange(0, PARTS)[:, None]
        keep = (piece < PIECES) & (ch < C)
        count = rows_of_pieces(piece, rows, ROWS, PIECES)
        distance = tl.where(keep, tl.load(MOMENTS + piece * C + ch, keep, 0.0) - mean, 0.0)
        squares += tl.load(MOMENTS + (PIECES + piece) * C + ch, keep, 0.0)
        squares += count * distance * distance
        total += count * distance
    off = tl.sum(total, 0, keep_dims=True) / rows  # far from zero the mean has a few roundings
    tl.store(MEAN + ch, mean + off, ch < C)
    tl.store(VAR + ch, tl.sum(squares, 0, keep_dims=True) / rows, ch < C)


# Bytes: x once, from L2 as far as it fits, residual and y once.
@triton.jit
def batch_norm_kernel(
    X, R, W, B, MEAN, VAR, Y, rows, eps, C: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, _, scale, bias = of_channels(W, B, MEAN, VAR, column, eps, C, BLOCK)
    tiles = tl.cdiv(rows, ROWS)
    for t in tl.range(piece, tiles, PIECES, num_stages=3):
        at, keep = tile_of_batch(tiles - 1 - t, column, rows, C, BLOCK, ROWS)
        z = (tl.load(X + at, keep, 0.0).to(tl.float32) - mean) * scale + bias
        if R is not None:
            z += tl.load(R + at, keep, 0.0).to(tl.float32)
        tl.store(Y + at, activated(z, ACT), keep)


@triton.jit
def of_channels(
    W, B, MEAN, VAR, column, eps, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a block of columns: mean, rstd, rstd · weight and bias, as rows."""
    ch = (column * BLOCK + tl.arange(0, BLOCK))[None, :]
    mean = tl.load(MEAN + ch, ch < C, 0.0)
    rstd = tl.rsqrt(tl.load(VAR + ch, ch < C, 0.0) + tl.cast(eps, tl.float32))
    scale, bias = rstd, tl.zeros_like(rstd)
    if W is not None:
        scale *= tl.load(W + ch, ch < C, 0.0).to(tl.float32)
    if B is not None:
        bias += tl.load(B + ch, ch < C, 0.0).to(tl.float32)
    return mean, rstd, scale, bias
