"""Normalisation of groups of channels, as in group_norm.py, of a tensor that is channels-last in
memory: rows of c channels, one for each position of each sample.

A group is a few neighbouring columns of all rows of a sample, too narrow for wide reads. A program
therefore takes whole blocks of columns, finds what each channel has in its piece of the rows, and
a second kernel merges pieces and the channels of each group. A third kernel reads everything again
and writes the results. All sums are in fp32, and pieces are merged in order: the same bits every
time. group_norm_rows_backward.py has the gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.inputs import common_dtype, dense, dynamic, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import multiprocessors


class Tiles(NamedTuple):
    """How the rows of a sample are divided: blocks of `block` columns, `across` of them; tiles of
    `rows` rows; pieces of `length` rows, which one program walks through, `pieces` of them.
    """

    block: int
    rows: int
    across: int
    length: int
    pieces: int
    warps: int

    @property
    def constants(self) -> dict:
        return dict(BLOCK=self.block, ROWS=self.rows, ACROSS=self.across, num_warps=self.warps)


def channels_last(x: Tensor) -> bool:
    """Is x `[b, c, ...]` known to be rows of channels in memory, and not planes as well?"""
    last = dense(x, [0, *range(2, x.dim()), 1]) if x.dim() > 2 else False
    return last and not dense(x, range(x.dim()))


def block_of_channels(c: int) -> int:
    """Columns of a block: as many as divide c, so that no lane is idle, or else a power of two."""
    divides = c & -c
    return min(256, divides if divides >= 64 else triton.next_power_of_2(c))


def tiles_of(x: Tensor, elements: int = 2048, warps: int = 2, programs: int = 4) -> Tiles:
    """Tiles of so many elements, and as many pieces as give each multiprocessor so many programs,
    if there are rows for them (swept on an H200: benchmarks/results/sweep-group-norm-rows.json).
    """
    b, c, inner = x.shape[0], number(x.shape[1]), math.prod(map(number, x.shape[2:]))
    block = block_of_channels(c)
    rows, across = max(1, elements // block), triton.cdiv(c, block)
    tiles = triton.cdiv(inner, rows)
    samples = 8 if dynamic(b) else max(1, b)
    pieces = min(tiles, triton.cdiv(programs * multiprocessors(x.device), samples * across))
    length = triton.cdiv(tiles, pieces) * rows
    return Tiles(block, rows, across, length, triton.cdiv(inner, length), warps)


def forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str,
    save: bool, tiles: Tiles | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y in x's layout, and mean and rstd `[b · groups]` in fp32, empty unless saved. y has `dtype`,
    or what torch promotes x, weight and bias to.

    x is `[b, c, ...]`, channels-last, in fp32, bf16 or fp16; weight and bias are `[c]`, contiguous,
    of x's dtype or in fp32. act is a word of common/activations.py. Grids: pieces of all samples by
    blocks of columns; groups of all samples; tiles of all samples by blocks of columns.
    """
    b, c, inner = x.shape[0], number(x.shape[1]), math.prod(map(number, x.shape[2:]))
    tiles = tiles or tiles_of(x)
    y = torch.empty_like(x, dtype=dtype or common_dtype(x, weight, bias))
    moments = torch.empty((2, b * tiles.pieces, c), dtype=torch.float32, device=x.device)
    mean, rstd = (torch.empty(b * groups, dtype=torch.float32, device=x.device) for _ in range(2))
    sizes = dict(C=c, INNER=inner)
    launch(
        row_moments_kernel, (b * tiles.pieces * tiles.across,), x, moments, b,
        PIECES=tiles.pieces, LENGTH=tiles.length, **sizes, **tiles.constants,
    )  # fmt: skip
    launch(
        merge_moments_kernel, (b * groups,), moments, mean, rstd, b, eps, GROUPS=groups,
        PIECES=tiles.pieces, LENGTH=tiles.length, **merging(c // groups, tiles.pieces), **sizes,
    )  # fmt: skip
    launch(
        apply_to_rows_kernel, (b * triton.cdiv(inner, tiles.rows) * tiles.across,),
        x, weight, bias, mean, rstd, y, GROUPS=groups, ACT=act, **sizes, **tiles.constants,
    )  # fmt: skip
    return (y, mean, rstd) if save else (y, mean[:0], rstd[:0])


def merging(per: int, pieces: int) -> dict:
    """Constants of the kernels that merge the channels of a group and the pieces of a sample."""
    channels, parts = triton.next_power_of_2(per), triton.next_power_of_2(pieces)
    return dict(PER=channels, PARTS=min(parts, max(1, 4096 // channels)), num_warps=4)


@triton.jit
def tile_of_rows(
    t, column, C: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Tile number t of a sample's rows in a block of columns: its channels, where its elements are
    from the sample on, and which of them exist.
    """
    ch = column * BLOCK + tl.arange(0, BLOCK)
    row = t * ROWS + tl.arange(0, ROWS)
    return ch, row[:, None] * C + ch[None, :], (row < INNER)[:, None] & (ch < C)[None, :]


# Bytes: x once, 8 a piece and channel.
@triton.jit
def row_moments_kernel(
    X, MOMENTS, samples, C: tl.constexpr, INNER: tl.constexpr, PIECES: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    X += (piece // PIECES).to(tl.int64) * (C * INNER)
    first = piece % PIECES * (LENGTH // ROWS)
    means = tl.zeros([ROWS, BLOCK], tl.float32)  # Welford's, in each lane
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, LENGTH // ROWS, num_stages=3):
        _, at, keep = tile_of_rows(first + i, column, C, INNER, BLOCK, ROWS)
        x = tl.load(X + at, keep, 0.0).to(tl.float32)
        means, squares = with_row(means, squares, x, keep, i + 1)
    # how many rows each lane has seen, and all of them
    seen = tl.minimum(tl.maximum(INNER - first * ROWS - tl.arange(0, ROWS), 0), LENGTH)
    seen = ((seen + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    count = rows_of_piece(piece % PIECES, INNER, LENGTH)
    mean, squares = of_lanes(means, squares, seen, count)
    ch = column * BLOCK + tl.arange(0, BLOCK)
    at = MOMENTS + piece.to(tl.int64) * C + ch
    tl.store(at, mean, ch < C)
    tl.store(at + tl.cast(samples, tl.int64) * (PIECES * C), squares, ch < C)


@triton.jit
def with_row(means, squares, x, keep, seen):
    """Welford's mean and sum of squared distances of each lane, with x, if it exists, which is
    number `seen` of the lane.
    """
    delta = x - means
    means = tl.where(keep, means + delta * (1.0 / seen), means)
    return means, squares + tl.where(keep, delta * (x - means), 0.0)


@triton.jit
def of_lanes(means, squares, seen, count):
    """Of each column: the mean and the sum of squared distances of its lanes, which have `seen`
    numbers each, `count` together.
    """
    mean = tl.sum(means * seen, 0) / count
    # far from zero this mean has a few roundings, which the distances from it have not
    mean += tl.sum((means - mean[None, :]) * seen, 0) / count
    distance = means - mean[None, :]
    return mean, tl.sum(squares + seen * distance * distance, 0)


@triton.jit
def rows_of_piece(piece, INNER: tl.constexpr, LENGTH: tl.constexpr):
    return tl.minimum(INNER - piece * LENGTH, LENGTH)


# Bytes: 8 a piece and channel, 8 a group. Few, so that they are read twice: for the mean, and for
# the distances from it.
@triton.jit
def merge_moments_kernel(
    MOMENTS, MEAN, RSTD, samples, eps, GROUPS: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr,
    PIECES: tl.constexpr, LENGTH: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    per: tl.constexpr = C // GROUPS
    sample, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    total = tl.zeros([PARTS, PER], tl.float32)
    for start in tl.range(0, PIECES, PARTS):
        at, count, keep = parts_of(sample, group, start, per, C, INNER, PIECES, LENGTH, PER, PARTS)
        total += tl.load(MOMENTS + at, keep, 0.0) * count
    mean = tl.sum(total) / (per * INNER)
    squares = tl.zeros([PARTS, PER], tl.float32)
    total = tl.zeros([PARTS, PER], tl.float32)
    for start in tl.range(0, PIECES, PARTS):
        at, count, keep = parts_of(sample, group, start, per, C, INNER, PIECES, LENGTH, PER, PARTS)
        distance = tl.where(keep, tl.load(MOMENTS + at, keep, 0.0) - mean, 0.0)
        at += tl.cast(samples, tl.int64) * (PIECES * C)
        squares += tl.load(MOMENTS + at, keep, 0.0) + count * distance * distance
        total += count * distance
    off = tl.sum(total) / (per * INNER)  # far from zero the mean has a few roundings
    tl.store(MEAN + tl.program_id(0), mean + off)
    rstd = tl.rsqrt(tl.sum(squares) / (per * INNER) + tl.cast(eps, tl.float32))
    tl.store(RSTD + tl.program_id(0), rstd)


@triton.jit
def parts_of(
    sample, group, start, per: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr,
    PIECES: tl.constexpr, LENGTH: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Where the numbers of some pieces and of a group's channels are, how many rows the pieces
    have, and which of them exist.
    """
    piece, ch = start + tl.arange(0, PARTS), tl.arange(0, PER)
    at = (sample.to(tl.int64) * PIECES + piece)[:, None] * C + (group * per + ch)[None, :]
    keep = (piece < PIECES)[:, None] & (ch < per)[None, :]
    return at, rows_of_piece(piece, INNER, LENGTH).to(tl.float32)[:, None], keep


# Bytes: x once, from L2 as far as it fits, y once; numbers of channels and groups from L1.
@triton.jit
def apply_to_rows_kernel(
    X, W, B, MEAN, RSTD, Y, GROUPS: tl.constexpr, ACT: tl.constexpr, C: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    sample, base, ch, at, keep = tile_of_program(C, INNER, BLOCK, ROWS, ACROSS)
    x = tl.load(X + base + at, keep, 0.0, eviction_policy="evict_first").to(tl.float32)
    mean, rstd = of_channels(MEAN, RSTD, sample, ch, GROUPS, C)
    y = affine_of_rows((x - mean) * rstd, W, B, ch, C)
    tl.store(Y + base + at, activated(y, ACT), keep, eviction_policy="evict_first")


@triton.jit
def tile_of_program(
    C: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """Of a program that has one tile: its sample, where that begins, and what tile_of_rows gives.
    The last tiles come first: what was read last is the nearest.
    """
    tiles: tl.constexpr = (INNER + ROWS - 1) // ROWS
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    column, program = program % ACROSS, program // ACROSS
    sample = program // tiles
    ch, at, keep = tile_of_rows(program % tiles, column, C, INNER, BLOCK, ROWS)
    return sample, sample.to(tl.int64) * (C * INNER), ch, at, keep


@triton.jit
def of_channels(FIRST, SECOND, sample, ch, GROUPS: tl.constexpr, C: tl.constexpr):
    """Two numbers of the groups that some channels of a sample are in, as rows."""
    group = sample * GROUPS + ch // (C // GROUPS)
    first = tl.load(FIRST + group, ch < C, 0.0)[None, :]
    return first, tl.load(SECOND + group, ch < C, 0.0)[None, :]


@triton.jit
def affine_of_rows(u, W, B, ch, C: tl.constexpr):
    """u · weight + bias of a tile, with a channel a column."""
    if W is not None:
        u *= tl.load(W + ch, ch < C, 0.0).to(tl.float32)[None, :]
    if B is not None:
        u += tl.load(B + ch, ch < C, 0.0).to(tl.float32)[None, :]
    return u
