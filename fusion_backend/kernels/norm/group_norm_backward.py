"""Backward of the normalisation of groups in group_norm.py.

With u = (x - mean) · rstd, z = u · weight + bias and g = dy · act'(z), the gradients of weight and
bias are the sums of g · u and g over the planes of a channel; with h = g · weight, dx = rstd (h -
mean(h) - u mean(h · u)). The sums of each tile go to memory and are added up by another kernel. No
atomics: the same bits every time. Sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import common_dtype, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import Config, grid
from fusion_backend.kernels.norm.group_norm import affine, few, size_of, tile, tiles_of
from fusion_backend.kernels.norm.weight_sums import add_up


def backward_config(size: int, itemsize: int, split: bool) -> Config:
    """16 elements a thread, of two tensors, but 32 of the largest group held. One program a
    multiprocessor walks through a larger group, so that L2 keeps it until it is read again. All
    read ahead, if shared memory allows.
    """
    if split or size > 16384:
        return Config(8192, 1, 16, *(() if split else (1, 3)))
    block = triton.next_power_of_2(size)
    warps = min(16, max(4, block // 512))
    return Config(16384, 1, warps, 16 // warps, 3 if block * itemsize <= 32768 else 2)


def backward(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
    rstd: Tensor, act: str, needs: tuple[bool, bool, bool], config: Config | None = None,
    split: bool | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x `[b, c, ...]`, contiguous, and of weight and bias `[c]`, each in its
    dtype; None where `needs` says no.

    dy is copied where it is not contiguous; x, weight, bias and act as in the forward, mean and
    rstd what it saved. Grid: a few programs a multiprocessor, which walk through the groups of all
    samples, or a program for each tile.
    """
    need_x, need_w, need_b = (
        needs[0],
        needs[1] and weight is not None,
        needs[2] and bias is not None,
    )
    b, c, rows = x.shape[0], number(x.shape[1]), x.shape[0] * groups
    split = few(x, groups) if split is None else split
    config = config or backward_config(size_of(x, groups), x.element_size(), split)
    constants, across, tiles = tiles_of(x, groups, config)
    dx = flat(x.shape, x.dtype, x.device) if need_x else None
    shape = (need_w + need_b, b * across, c)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device) if need_w or need_b else None
    args, wanted = (
        (dy.contiguous(), x, weight, bias, mean, rstd),
        dict(WEIGHT=need_w, BIAS=need_b, ACT=act),
    )
    if split:
        parts = (
            torch.empty((2, rows, tiles), dtype=torch.float32, device=x.device) if need_x else None
        )
        launch(
            group_norm_backward_sums_kernel,
            (rows * tiles,),
            *args,
            sums,
            parts,
            rows,
            **wanted,
            **constants,
        )
        if need_x:
            launch(
                group_norm_backward_apply_kernel, (rows * tiles,), *args, parts, dx, rows, ACT=act,
                PARTS_BLOCK=triton.next_power_of_2(tiles), **constants,
            )  # fmt: skip
    else:
        launch(
            group_norm_backward_kernel, (grid(rows, 1, config.programs, x.device),),
            *args, dx, sums, rows, STAGES=config.stages, **wanted, **constants,
        )  # fmt: skip
    dtype = x.dtype if sums is None else common_dtype(weight, bias)
    dx = dx if dx is None else shaped(dx, x.shape)
    return dx, *add_up(sums, dtype, need_w, need_b)


# Bytes: dy and x once, dx once, 8 a tile and channel; the second reading of a larger group comes
# from L2.
@triton.jit
def group_norm_backward_kernel(
    DY, X, W, B, MEAN, RSTD, DX, SUMS, rows, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = PER * INNER
    top, step = tl.program_id(0), tl.num_programs(0)
    groups = 1 if STAGES == 0 else tl.cdiv(rows - top, step)
    for i in tl.range(0, groups, num_stages=STAGES if TILES == 1 else 0):
        group = (top + i * step).to(tl.int64)
        first = group % GROUPS * PER
        mean = tl.load(MEAN + group)
        rstd = tl.load(RSTD + group)
        if TILES == 1:
            ch, at, keep = tile(0, PER, INNER, CH, BLOCK)
            at += group * size
            g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT)
            hu, hs = tile_sums(
                g * u, g, W, SUMS, rows, group, 0, ch, GROUPS, PER, INNER, BLOCK, WEIGHT, BIAS
            )
            if DX is not None:
                d = affine(g, W, None, first + ch, ch < PER) - hs / size - u * (hu / size)
                tl.store(DX + at, d * rstd, keep)
        else:
            hu = 0.0
            hs = 0.0
            for t in tl.range(0, TILES, num_stages=STAGES):
                ch, at, keep = tile(t, PER, INNER, CH, BLOCK)
                at += group * size
                g, u = before_affine(
                    DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT
                )
                some = tile_sums(
                    g * u, g, W, SUMS, rows, group, t, ch, GROUPS, PER, INNER, BLOCK, WEIGHT, BIAS
                )
                hu += some[0]
                hs += some[1]
            if DX is not None:
                for t in tl.range(0, TILES, num_stages=STAGES):
                    # what was read last is the nearest
                    ch, at, keep = tile(TILES - 1 - t, PER, INNER, CH, BLOCK)
                    at += group * size
                    g, u = before_affine(
                        DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT
                    )
                    d = affine(g, W, None, first + ch, ch < PER) - hs / size - u * (hu / size)
                    tl.store(DX + at, d * rstd, keep)


# Bytes: dy and x once, 8 a tile and channel, 8 a tile.
@triton.jit
def group_norm_backward_sums_kernel(
    DY, X, W, B, MEAN, RSTD, SUMS, PARTS, rows, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    group, t = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    ch, at, keep = tile(t, PER, INNER, CH, BLOCK)
    at += group.to(tl.int64) * (PER * INNER)
    mean, rstd, channel = tl.load(MEAN + group), tl.load(RSTD + group), group % GROUPS * PER + ch
    g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, channel, ch < PER, ACT)
    hu, hs = tile_sums(
        g * u, g, W, SUMS, rows, group, t, ch, GROUPS, PER, INNER, BLOCK, WEIGHT, BIAS
    )
    if PARTS is not None:
        tl.store(PARTS + tl.program_id(0), hu)
        tl.store(PARTS + rows * TILES + tl.program_id(0), hs)


# Bytes: dy and x once more, from L2 as far as they fit, dx once, 8 a tile and each tile of its
# group.
@triton.jit
def group_norm_backward_apply_kernel(
    DY, X, W, B, MEAN, RSTD, PARTS, DX, rows,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = PER * INNER
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is the nearest
    group, t = program // TILES, program % TILES
    ch, at, keep = tile(t, PER, INNER, CH, BLOCK)
    at += group.to(tl.int64) * size
    mean, rstd, channel = tl.load(MEAN + group), tl.load(RSTD + group), group % GROUPS * PER + ch
    g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, channel, ch < PER, ACT)
    part = tl.arange(0, PARTS_BLOCK)
    hu = tl.sum(tl.load(PARTS + group * TILES + part, part < TILES, 0.0))
    hs = tl.sum(tl.load(PARTS + (rows + group) * TILES + part, part < TILES, 0.0))
    d = affine(g, W, None, channel, ch < PER) - hs / size - u * (hu / size)
    tl.store(DX + at, d * rstd, keep, eviction_policy="evict_first")


@triton.jit
def before_affine(DY, X, keep, W, B, mean, rstd, channel, inside, ACT: tl.constexpr):
    """The gradient of the affine part's result, and what it was applied to: g and u of a tile, g 0
    outside.
    """
    u = (tl.load(X, keep, 0.0).to(tl.float32) - mean) * rstd
    g = tl.load(DY, keep, 0.0).to(tl.float32)
    if ACT == "silu":
        g = through_silu(g, affine(u, W, B, channel, inside))
    return g, u


@triton.jit
def through_silu(g, z):
    """The gradient of z, of which silu(z) has the gradient g."""
    s = tl.sigmoid(z)
    return g * (s * (1.0 + z * (1.0 - s)))


@triton.jit
def tile_sums(
    gu, gs, W, SUMS, rows, group, t, ch,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Sums along the planes of a tile go to memory, `[b · tiles along a plane, c]`; those over its
    channels, weighted, are returned.
    """
    across: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    gu = tl.sum(gu, 1)
    gs = tl.sum(gs, 1)
    at = (group // GROUPS * across + t % across) * (GROUPS * PER) + group % GROUPS * PER + ch
    if WEIGHT:
        tl.store(SUMS + at, gu, ch < PER)
        at += rows * (PER * across)
    if BIAS:
        tl.store(SUMS + at, gs, ch < PER)
    if W is not None:
        w = tl.load(W + group % GROUPS * PER + ch, ch < PER, 0.0).to(tl.float32)
        gu *= w
        gs *= w
    return tl.sum(gu), tl.sum(gs)
