"""Backward of the normalisation of groups of a channels-last tensor in group_norm_rows.py.

The formulas are those of group_norm_backward.py. A first kernel sums g · u and g over the rows of
each piece, channel by channel: partial sums of the gradients of weight and bias, which are added up
over all samples. A second one weighs them by the weight and merges them for each group, and a third
one reads everything again and writes dx. Sums in fp32, in order: the same bits every time.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import common_dtype, in_layout, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.norm.group_norm_backward import through_silu
from fusion_backend.kernels.norm.group_norm_rows import (
    Tiles,
    affine_of_rows,
    block_of_channels,
    merging,
    of_channels,
    parts_of,
    tile_of_program,
    tile_of_rows,
    tiles_of,
)
from fusion_backend.kernels.norm.weight_sums import add_up


def backward_tiles(x: Tensor) -> Tiles:
    """More warps where a block is few columns wide (the same sweep)."""
    wide = block_of_channels(number(x.shape[1])) == 256
    return tiles_of(x, 2048, *((2, 8) if wide else (4, 4)))


def backward(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, act: str, needs: tuple[bool, bool, bool], tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x `[b, c, ...]`, in its layout, and of weight and bias `[c]`, each in its
    dtype; None where `needs` says no.

    dy is copied where it is not laid out as x; x, weight, bias and act as in the forward, mean and
    rstd what it saved. Grids as those of the forward.
    """
    need_x, need_w, need_b = (
        needs[0],
        needs[1] and weight is not None,
        needs[2] and bias is not None,
    )
    if not (need_x or need_w or need_b):
        return None, None, None
    b, c, inner = x.shape[0], number(x.shape[1]), math.prod(map(number, x.shape[2:]))
    tiles, dy = tiles or backward_tiles(x), in_layout(x, dy)
    sums = torch.empty((2, b * tiles.pieces, c), dtype=torch.float32, device=x.device)
    sizes = dict(C=c, INNER=inner, GROUPS=groups)
    pieces = dict(PIECES=tiles.pieces, LENGTH=tiles.length)
    args = dy, x, weight, bias, mean, rstd
    launch(
        row_sums_kernel, (b * tiles.pieces * tiles.across,), *args, sums, b, ACT=act,
        **pieces, **sizes, **tiles.constants,
    )  # fmt: skip
    dx = None
    if need_x:
        dx = torch.empty_like(x)
        means = torch.empty((2, b * groups), dtype=torch.float32, device=x.device)
        launch(
            merge_sums_kernel, (b * groups,), sums, weight, means, b,
            **pieces, **merging(c // groups, tiles.pieces), **sizes,
        )  # fmt: skip
        launch(
            gradient_of_rows_kernel, (b * triton.cdiv(inner, tiles.rows) * tiles.across,),
            *args, means, dx, b, ACT=act, **sizes, **tiles.constants,
        )  # fmt: skip
    wanted = sums[0 if need_w else 1 : 2 if need_b else 1] if need_w or need_b else None
    dtype = x.dtype if wanted is None else common_dtype(weight, bias)
    return dx, *add_up(wanted, dtype, need_w, need_b)


# Bytes: dy and x once, 8 a piece and channel.
@triton.jit
def row_sums_kernel(
    DY, X, W, B, MEAN, RSTD, SUMS, samples, ACT: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, INNER: tl.constexpr, PIECES: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    sample = piece // PIECES
    base = sample.to(tl.int64) * (C * INNER)
    first = piece % PIECES * (LENGTH // ROWS)
    ch = column * BLOCK + tl.arange(0, BLOCK)
    mean, rstd = of_channels(MEAN, RSTD, sample, ch, GROUPS, C)
    gu = tl.zeros([ROWS, BLOCK], tl.float32)
    gs = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, LENGTH // ROWS, num_stages=3):
        _, at, keep = tile_of_rows(first + i, column, C, INNER, BLOCK, ROWS)
        g, u = before_affine(DY + base, X + base, at, keep, W, B, mean, rstd, ch, C, ACT)
        gu += g * u
        gs += g
    at = SUMS + piece.to(tl.int64) * C + ch
    tl.store(at, tl.sum(gu, 0), ch < C)
    tl.store(at + tl.cast(samples, tl.int64) * (PIECES * C), tl.sum(gs, 0), ch < C)


# Bytes: 8 a piece and channel, 8 a group.
@triton.jit
def merge_sums_kernel(
    SUMS, W, MEANS, samples, GROUPS: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr,
    PIECES: tl.constexpr, LENGTH: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    per: tl.constexpr = C // GROUPS
    sample, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    gu = tl.zeros([PARTS, PER], tl.float32)
    gs = tl.zeros([PARTS, PER], tl.float32)
    for start in tl.range(0, PIECES, PARTS):
        at, _, keep = parts_of(sample, group, start, per, C, INNER, PIECES, LENGTH, PER, PARTS)
        gu += tl.load(SUMS + at, keep, 0.0)
        gs += tl.load(SUMS + at + tl.cast(samples, tl.int64) * (PIECES * C), keep, 0.0)
    if W is not None:
        ch = tl.arange(0, PER)
        w = tl.load(W + group * per + ch, ch < per, 0.0).to(tl.float32)[None, :]
        gu *= w
        gs *= w
    tl.store(MEANS + tl.program_id(0), tl.sum(gu) / (per * INNER))
    tl.store(MEANS + samples * GROUPS + tl.program_id(0), tl.sum(gs) / (per * INNER))


# Bytes: dy and x once, from L2 as far as they fit, dx once.
@triton.jit
def gradient_of_rows_kernel(
    DY, X, W, B, MEAN, RSTD, MEANS, DX, samples, ACT: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    sample, base, ch, at, keep = tile_of_program(C, INNER, BLOCK, ROWS, ACROSS)
    mean, rstd = of_channels(MEAN, RSTD, sample, ch, GROUPS, C)
    hu, hs = of_channels(MEANS, MEANS + samples * GROUPS, sample, ch, GROUPS, C)
    g, u = before_affine(DY + base, X + base, at, keep, W, B, mean, rstd, ch, C, ACT)
    d = (affine_of_rows(g, W, None, ch, C) - hs - u * hu) * rstd
    tl.store(DX + base + at, d, keep, eviction_policy="evict_first")


@triton.jit
def before_affine(DY, X, at, keep, W, B, mean, rstd, ch, C: tl.constexpr, ACT: tl.constexpr):
    """The gradient of the affine part's result, and what it was applied to: g and u of a tile, g 0
    outside.
    """
    u = (tl.load(X + at, keep, 0.0).to(tl.float32) - mean) * rstd
    g = tl.load(DY + at, keep, 0.0).to(tl.float32)
    if ACT == "silu":
        g = through_silu(g, affine_of_rows(u, W, B, ch, C))
    return g, u
