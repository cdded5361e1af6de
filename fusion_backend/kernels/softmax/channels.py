"""Softmax over dimension 1 of `[n, c, ...]`, dense, and its logarithm, with their gradients.

y = e^(x - top) / Σ e^(x - top), top the largest x of a position; its logarithm is x - top - log Σ,
also written as a difference, x - logsumexp(x). The two differ beside an infinite x alone:
log_softmax is NaN at all channels, and the difference at those alone, elsewhere -infinity.
dx = y (dy - Σ y dy), and of the logarithm dy - e^y Σ dy. A program takes all channels of some
positions (common/channel_tiles.py). Computed in fp32; a position of -inf alone is NaN, as in torch.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.channel_tiles import Tile, planes, tile, tiles_of
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped

Kind = Literal["softmax", "log_softmax", "difference"]


def forward_tile(c: int) -> Tile:
    """As few warps as hold 32 positions, or 1024 elements: each warp more adds up the channels in
    shared memory with the others.
    """
    return tile_of(c, 32)


def backward_tile(c: int) -> Tile:
    """As above, of 64 positions."""
    return tile_of(c, 64)


def tile_of(c: int, positions: int) -> Tile:
    """1024 elements a warp, and more where that would be more than 8 warps."""
    channels = triton.next_power_of_2(c)
    positions = max(min(positions, 16384 // channels), 1024 // channels)
    return Tile(channels, positions, min(8, max(1, channels * positions // 1024)))


def forward(x: Tensor, dtype: torch.dtype, kind: Kind, how: Tile | None = None) -> Tensor:
    """y in x's shape and in `dtype`, contiguous.

    x is `[n, c, ...]`, contiguous, in fp32, bf16 or fp16; c up to MAX_CHANNELS. Grid: tiles of
    how.positions.
    """
    y, c, inner = flat(x.shape, dtype, x.device), number(x.shape[1]), planes(x)
    how = how or forward_tile(c)
    launch(
        channel_softmax_kernel, (tiles_of(x, how.positions),), x, y, x.shape[0],
        C=c, INNER=inner, KIND=kind, CHANNELS=how.channels, BLOCK=how.positions,
        num_warps=how.warps,
    )  # fmt: skip
    return shaped(y, x.shape)


def backward(
    dy: Tensor, y: Tensor, dtype: torch.dtype, kind: Kind, how: Tile | None = None
) -> Tensor:
    """dx in the shape of y and in `dtype`, contiguous.

    y is what the forward returned; dy is copied where it is not contiguous. Grid: tiles of
    how.positions.
    """
    dx, c, inner = flat(y.shape, dtype, y.device), number(y.shape[1]), planes(y)
    how = how or backward_tile(c)
    launch(
        channel_softmax_backward_kernel, (tiles_of(y, how.positions),),
        dy.contiguous(), y, dx, y.shape[0], C=c, INNER=inner, KIND=kind,
        CHANNELS=how.channels, BLOCK=how.positions, num_warps=how.warps,
    )  # fmt: skip
    return shaped(dx, y.shape)


# Bytes: x once, y once.
@triton.jit
def channel_softmax_kernel(
    X, Y, samples, C: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, first, at, keep = tile(tl.program_id(0), samples, C, INNER, CHANNELS, BLOCK)
    x = tl.load(X + first + at, keep, float("-inf")).to(tl.float32)
    top = tl.max(x, 0, keep_dims=True)
    if KIND == "difference":
        infinite = (top == float("inf")) & (tl.max(tl.where(x != x, 1, 0), 0, keep_dims=True) == 0)
    x -= top
    e = tl.exp2(x * 1.4426950408889634)
    total = tl.sum(e, 0, keep_dims=True)
    y = e * (1.0 / total) if KIND == "softmax" else x - tl.log(total)
    if KIND == "difference":
        y = tl.where(infinite, x, y)
    tl.store(Y + first + at, y, keep)


# Bytes: dy and y once, dx once.
@triton.jit
def channel_softmax_backward_kernel(
    DY, Y, DX, samples, C: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, first, at, keep = tile(tl.program_id(0), samples, C, INNER, CHANNELS, BLOCK)
    dy = tl.load(DY + first + at, keep, 0.0).to(tl.float32)
    y = tl.load(Y + first + at, keep, 0.0).to(tl.float32)
    if KIND == "softmax":
        dx = y * (dy - tl.sum(y * dy, 0, keep_dims=True))
    else:
        dx = dy - tl.exp2(y * 1.4426950408889634) * tl.sum(dy, 0, keep_dims=True)
    tl.store(DX + first + at, dx, keep)
