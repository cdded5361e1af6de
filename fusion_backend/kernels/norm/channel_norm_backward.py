"""Backward of the norms over channels in channel_norm.py.

u = x · factor, or (x - mean) · factor; h = dy · scale and g = h · weight. dx = factor (g - u Σ g u
/ Σ u²), in a layer norm less factor · mean(g). Σ u² is c, of unit length 1, and infinite where eps
was longer than x. The gradients of weight and bias are the sums over positions of h · u and dy. A
program holds all channels of its positions, so mean and factor are computed again: nothing but x is
kept, and a forward that Inductor computes has nothing to write for us. Sums are in fp32; the
partial sums of each program are added up by a second kernel, in order: the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.channel_tiles import Tile, planes, tile
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import grid
from fusion_backend.kernels.norm.channel_norm import ChannelNorm, factor_of
from fusion_backend.kernels.norm.group_norm import affine
from fusion_backend.kernels.norm.weight_sums import add_up, write_sums


def backward_tile(c: int) -> Tile:
    """32 elements a thread, of two tensors: with fewer, the shuffles of the sums over channels take
    as long as the memory. 16 elements of more than 512 channels, and 8 positions: a thread would
    keep too many sums of channels, and spill.
    """
    channels = triton.next_power_of_2(c)
    if channels > 512:
        return Tile(channels, 8, 16, 2)
    positions = max(16, min(512, 8192 // channels))
    warps = max(4, channels * positions // 1024)
    return Tile(channels, positions, warps, 16 // warps)


def backward(
    dy: Tensor,
    x: Tensor,
    norm: ChannelNorm,
    needs: tuple[bool, bool, bool],
    how: Tile | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x `[n, c, ...]`, contiguous, and of weight and bias, in their shapes and x's
    dtype; None where `needs` says no.

    dy is copied where it is not contiguous; x, weight and bias as in the forward. Grid:
    how.programs a multiprocessor, which walk through the tiles.
    """
    need_x, vectors = needs[0], (norm.weight, norm.bias)
    need = [n and v is not None for n, v in zip(needs[1:], vectors, strict=True)]
    if not (need_x or any(need)):
        return None, None, None
    c, inner = number(x.shape[1]), planes(x)
    how = how or backward_tile(c)
    programs = grid(x.shape[0] * inner, how.positions, how.programs, x.device)
    dx = flat(x.shape, x.dtype, x.device) if need_x else None
    shape = (sum(need), programs, c)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device) if any(need) else None
    launch(
        channel_norm_backward_kernel, (programs,),
        dy.contiguous(), x, norm.weight, dx, sums, x.shape[0], norm.eps,
        1.0 if norm.scale is None else norm.scale,
        C=c, INNER=inner, NORM=norm.norm, WEIGHT=need[0], BIAS=need[1], CHANNELS=how.channels,
        BLOCK=how.positions, STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip
    dx, found = dx if dx is None else shaped(dx, x.shape), add_up(sums, x.dtype, *need)
    return dx, *(d if d is None else d.view(v.shape) for d, v in zip(found, vectors, strict=True))


# Bytes: dy and x once, dx once, 8 a program and channel.
@triton.jit
def channel_norm_backward_kernel(
    DY, X, W, DX, SUMS, samples, eps, scale, C: tl.constexpr, INNER: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dw = tl.zeros([CHANNELS], tl.float32)
    db = tl.zeros([CHANNELS], tl.float32)
    tiles = tl.cdiv(tl.cast(samples, tl.int64) * INNER, BLOCK).to(tl.int32)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        ch, first, at, keep = tile(t, samples, C, INNER, CHANNELS, BLOCK)
        x = tl.load(X + first + at, keep, 0.0).to(tl.float32)
        g = tl.load(DY + first + at, keep, 0.0).to(tl.float32)
        x, factor, total = factor_of(x, ch, eps, C, NORM)
        u = tl.where(keep, x * factor, 0.0)  # where there is no position it may be infinite
        if BIAS:
            # not of g itself: in fp32 Triton 3.6 sums a tile that was just loaded as if its rows
            # were held as its columns are, and adds up different channels
            db += tl.sum(tl.where(keep, g, 0.0), 1)
        if NORM == "length":
            g *= tl.cast(scale, tl.float32)
        if WEIGHT:
            dw += tl.sum(g * u, 1)
        if DX is not None:
            g = affine(g, W, None, ch, ch < C)
            d = g - u * (tl.sum(g * u, 0, keep_dims=True) / total)
            if NORM == "layer":
                d -= tl.sum(g, 0, keep_dims=True) / C
            tl.store(DX + first + at, d * factor, keep)
    if SUMS is not None:
        ch = tl.arange(0, CHANNELS)
        write_sums(SUMS, dw, db, tl.program_id(0), tl.num_programs(0), ch, ch < C, C, WEIGHT, BIAS)
