"""Normalisation of groups of channels: y = act((x - mean) · rstd · weight + bias) of `[b, c, ...]`,
dense.

A group is contiguous in memory: `per` planes of `inner` elements, walked through in tiles of CH
planes and BLOCK elements of each. It belongs to one program, which holds it where it is one tile;
of few large groups, which would leave multiprocessors without work, each tile has a program of its
own, in two kernels: moments of the tiles, then results. All sums are in fp32.
group_norm_backward.py has the gradients.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.inputs import common_dtype, dynamic, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import Config, grid, multiprocessors

SPLIT = 1 << 16  # elements of the smallest group that is given to several programs


def size_of(x, groups) -> int:
    """Elements of a group."""
    return math.prod(map(number, x.shape[1:])) // groups


def few(x, groups) -> bool:
    """Are there too few groups for the multiprocessors, and are they large enough to be split?"""
    rows = x.shape[0] * groups
    return (
        size_of(x, groups) >= SPLIT and not dynamic(rows) and rows < 2 * multiprocessors(x.device)
    )


def forward_config(size: int, split: bool) -> Config:
    """32 elements a thread where the group may be held or is split, else 16."""
    return Config(8192, 1, 8) if split else Config(16384 if size <= 16384 else 8192, 1, 16)


def tiles_of(x, groups, config: Config) -> tuple[dict, int, int]:
    """The constants of a kernel, the tiles along a plane and those of a group. Smaller tiles have
    fewer warps, 8 elements a thread.
    """
    per, inner = number(x.shape[1]) // groups, math.prod(map(number, x.shape[2:]))
    block = min(config.block, triton.next_power_of_2(inner))
    ch = min(config.block // block, triton.next_power_of_2(per))
    across = (inner + block - 1) // block
    tiles = (per + ch - 1) // ch * across
    warps = min(config.warps, max(1, ch * block // 256))
    constants = dict(
        GROUPS=groups, PER=per, INNER=inner, CH=ch, BLOCK=block, TILES=tiles, num_warps=warps
    )
    return constants, across, tiles


def forward(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str,
    save: bool, config: Config | None = None, split: bool | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y `[b, c, ...]`, and mean and rstd `[b · groups]` in fp32, empty unless saved. y has `dtype`,
    or what torch promotes x, weight and bias to.

    x is contiguous, in fp32, bf16 or fp16; weight and bias are `[c]`, contiguous, of x's dtype or
    in fp32. act is a word of common/activations.py. Grid: groups of all samples, or their tiles.
    """
    dtype, rows = dtype or common_dtype(x, weight, bias), x.shape[0] * groups
    y = flat(x.shape, dtype, x.device)
    mean, rstd = (
        torch.empty(rows if save else 0, dtype=torch.float32, device=x.device) for _ in range(2)
    )
    split = few(x, groups) if split is None else split
    config = config or forward_config(size_of(x, groups), split)
    constants, _, tiles = tiles_of(x, groups, config)
    args = y, mean if save else None, rstd if save else None, rows
    if split:
        parts = torch.empty((2, rows, tiles), dtype=torch.float32, device=x.device)
        launch(group_norm_moments_kernel, (rows * tiles,), x, parts, rows, **constants)
        launch(
            group_norm_apply_kernel, (rows * tiles,), x, weight, bias, parts, *args, eps, ACT=act,
            PARTS_BLOCK=triton.next_power_of_2(tiles), **constants,
        )  # fmt: skip
    else:
        launch(
            group_norm_kernel, (grid(rows, 1, config.programs, x.device),),
            x, weight, bias, *args, eps, ACT=act, STAGES=config.stages, **constants,
        )  # fmt: skip
    return shaped(y, x.shape), mean, rstd


# Bytes: x once, y once; of a group that is not held in registers the second reading comes from L2.
@triton.jit
def group_norm_kernel(
    X, W, B, Y, MEAN, RSTD, rows, eps,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = PER * INNER
    top, step = tl.program_id(0), tl.num_programs(0)
    groups = 1 if STAGES == 0 else tl.cdiv(rows - top, step)
    for i in tl.range(0, groups, num_stages=STAGES if TILES == 1 else 0):
        group = (top + i * step).to(tl.int64)
        first = group % GROUPS * PER
        if TILES == 1:
            ch, at, keep = tile(0, PER, INNER, CH, BLOCK)
            x = tl.load(X + group * size + at, keep, 0.0).to(tl.float32)
            mean = tl.sum(x) / size
            x = tl.where(keep, x - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(x * x) / size + tl.cast(eps, tl.float32))
            tl.store(
                Y + group * size + at,
                activated(affine(x * rstd, W, B, first + ch, ch < PER), ACT),
                keep,
            )
        else:
            mean, squares = moments(X + group * size, size, CH * BLOCK, STAGES)
            rstd = tl.rsqrt(squares / size + tl.cast(eps, tl.float32))
            for t in tl.range(0, TILES, num_stages=STAGES):
                # what was read last is the nearest
                ch, at, keep = tile(TILES - 1 - t, PER, INNER, CH, BLOCK)
                u = (tl.load(X + group * size + at, keep, 0.0).to(tl.float32) - mean) * rstd
                tl.store(
                    Y + group * size + at,
                    activated(affine(u, W, B, first + ch, ch < PER), ACT),
                    keep,
                )
        if RSTD is not None:
            tl.store(MEAN + group, mean)
            tl.store(RSTD + group, rstd)


# Bytes: x once, 8 a tile.
@triton.jit
def group_norm_moments_kernel(
    X, PARTS, rows, GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    group, t = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    _, at, keep = tile(t, PER, INNER, CH, BLOCK)
    x = tl.load(
        X + group.to(tl.int64) * (PER * INNER) + at, keep, 0.0, eviction_policy="evict_last"
    ).to(tl.float32)
    mean = tl.sum(x) / count(t, PER, INNER, CH, BLOCK)
    x = tl.where(keep, x - mean, 0.0)
    tl.store(PARTS + tl.program_id(0), mean)
    tl.store(PARTS + rows * TILES + tl.program_id(0), tl.sum(x * x))


# Bytes: x once more, from L2 as far as it fits, y once, 8 a tile and each tile of its group.
@triton.jit
def group_norm_apply_kernel(
    X, W, B, PARTS, Y, MEAN, RSTD, rows, eps,
    GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = PER * INNER
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is the nearest
    group, t = program // TILES, program % TILES
    ch, at, keep = tile(t, PER, INNER, CH, BLOCK)
    at += group.to(tl.int64) * size
    x = tl.load(X + at, keep, 0.0, eviction_policy="evict_first").to(tl.float32)
    part = tl.arange(0, PARTS_BLOCK)
    means = tl.load(PARTS + group * TILES + part, part < TILES, 0.0)
    squares = tl.load(PARTS + (rows + group) * TILES + part, part < TILES, 0.0)
    counts = tl.where(part < TILES, count(part, PER, INNER, CH, BLOCK), 0)
    mean = tl.sum(means * counts) / size
    squares += counts * (means - mean) * (means - mean)
    rstd = tl.rsqrt(tl.sum(squares) / size + tl.cast(eps, tl.float32))
    if RSTD is not None:
        if t == 0:
            tl.store(MEAN + group, mean)
            tl.store(RSTD + group, rstd)
    y = activated(affine((x - mean) * rstd, W, B, group % GROUPS * PER + ch, ch < PER), ACT)
    tl.store(Y + at, y, keep, eviction_policy="evict_first")


@triton.jit
def tile(t, PER: tl.constexpr, INNER: tl.constexpr, CH: tl.constexpr, BLOCK: tl.constexpr):
    """Tile number t of a group: its channels, where its elements are, and which of them exist."""
    across: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    ch = t // across * CH + tl.arange(0, CH)
    lane = (t % across * BLOCK + tl.arange(0, BLOCK))[None, :]
    return ch, ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)


@triton.jit
def count(t, PER: tl.constexpr, INNER: tl.constexpr, CH: tl.constexpr, BLOCK: tl.constexpr):
    """How many elements of tile number t exist."""
    across: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    return tl.minimum(PER - t // across * CH, CH) * tl.minimum(INNER - t % across * BLOCK, BLOCK)


@triton.jit
def affine(u, W, B, channel, inside):
    """u · weight + bias of a tile, with a channel a row."""
    if W is not None:
        u *= tl.load(W + channel, inside, 0.0).to(tl.float32)[:, None]
    if B is not None:
        u += tl.load(B + channel, inside, 0.0).to(tl.float32)[:, None]
    return u


@triton.jit
def moments(X, size: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Mean, and sum of squared distances from it, of size elements: Welford's, in each lane."""
    lane = tl.arange(0, BLOCK)
    means = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        x = tl.load(X + start + lane, start + lane < size, 0.0).to(tl.float32)
        delta = x - means
        means = tl.where(start + lane < size, means + delta * (1.0 / (start // BLOCK + 1)), means)
        squares += tl.where(start + lane < size, delta * (x - means), 0.0)
    counts = (size - lane + BLOCK - 1) // BLOCK
    mean = tl.sum(means * counts) / size
    return mean, tl.sum(squares + counts * (means - mean) * (means - mean))
