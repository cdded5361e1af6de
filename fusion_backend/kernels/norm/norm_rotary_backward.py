"""Backward of norm_rotary.py: the gradients of x and the weight.

dn is dy rotated back: dn1 = dy1 · cos1 + dy2 · sin2, dn2 = dy2 · cos2 - dy1 · sin1. With u = x ·
rstd and g = dn · (weight + offset), dx = rstd (g - u mean(g u)). dweight is the sum over heads and
positions of dn · u: partial sums of each program, added up by a second kernel, in order: the same
bits every time (weight_sums.py). Sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import grid
from fusion_backend.kernels.norm.norm_rotary import (
    Geometry,
    Heads,
    heads_config,
    read_pairs,
    tile_of,
    write_pairs,
)
from fusion_backend.kernels.norm.weight_sums import add_up


def backward_config(heads: int, d: int) -> Heads:
    """One head at several positions: the sums of dweight then fit in fewer registers."""
    return heads_config(1, d)._replace(programs=8, stages=3)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, offset: float, cos: Tensor, sin: Tensor, style: str,
    rstd: Tensor, needs: tuple[bool, bool], config: Heads | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, in memory as torch.empty_like(x), and of weight `[d]`, each in the dtype
    of its argument; None where `needs` says no.

    dy has the shape of x and any strides, rstd is what the forward has saved; for all else see
    norm_rotary.forward. Grid: config.programs a multiprocessor, which walk through tiles.
    """
    dx = torch.empty_like(x) if needs[0] else None
    if not any(needs):
        return None, None
    at = Geometry(x, cos, sin)
    config = config or backward_config(at.heads, at.d)
    dy = dy if statically_known_true(dy.stride(-1) == 1) else dy.contiguous()
    tiles = at.tiles(config)
    programs = grid(tiles, 1, config.programs, x.device)
    sums = None
    if needs[1]:
        sums = torch.empty((1, programs, at.d), dtype=torch.float32, device=x.device)
    dx_strides = (0, 0, 0) if dx is None else at.strides(dx)
    launch(
        norm_rotary_backward_kernel, (programs,),
        dy, x, weight, cos, sin, rstd, dx, sums, at.positions, at.length, tiles, offset,
        *at.strides(dy), *at.strides(x), *at.strides(cos)[:2], *at.strides(sin)[:2],
        *dx_strides,
        INTERLEAVED=style == "interleaved", STAGES=config.stages, **at.constants(config),
    )  # fmt: skip
    return dx, add_up(sums, weight.dtype, True, False)[0]


# Bytes: dy, x and rstd once, dx once, 4 a program and column; a row of cos and of sin for EACH
# heads, which the other batches and heads find in the L2.
@triton.jit
def norm_rotary_backward_kernel(
    DY, X, W, COS, SIN, RSTD, DX, SUMS, positions, length, tiles, offset,
    dy_batch, dy_place, dy_head, x_batch, x_place, x_head, cos_batch, cos_place, sin_batch,
    sin_place, dx_batch, dx_place, dx_head,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    all_heads = tl.zeros([POSITIONS, EACH, 1], tl.int32)
    w1, w2 = read_pairs(W + all_heads, True, D, BLOCK, INTERLEAVED)
    w1 += tl.cast(offset, tl.float32)
    w2 += tl.cast(offset, tl.float32)
    dw1 = tl.zeros([POSITIONS, EACH, BLOCK], tl.float32)
    dw2 = tl.zeros([POSITIONS, EACH, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        batch, place, head, keep = tile_of(tile, positions, length, HEADS, EACH, POSITIONS)
        row = DY + batch * dy_batch + place * dy_place + head * dy_head
        dy1, dy2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
        row = X + batch * x_batch + place * x_place + head * x_head
        u1, u2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
        row = COS + batch * cos_batch + place * cos_place + all_heads
        cos1, cos2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
        row = SIN + batch * sin_batch + place * sin_place + all_heads
        sin1, sin2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
        rstd = tl.load(RSTD + (batch * length + place) * HEADS + head, keep, 0.0)
        u1 *= rstd
        u2 *= rstd
        g1, g2 = dy1 * cos1 + dy2 * sin2, dy2 * cos2 - dy1 * sin1
        if SUMS is not None:
            dw1 += g1 * u1
            dw2 += g2 * u2
        if DX is not None:
            g1 *= w1
            g2 *= w2
            along = tl.sum(g1 * u1 + g2 * u2, 2, keep_dims=True) / D
            row = DX + batch * dx_batch + place * dx_place + head * dx_head
            g1, g2 = (g1 - u1 * along) * rstd, (g2 - u2 * along) * rstd
            write_pairs(row, g1, g2, keep, D, BLOCK, INTERLEAVED)
    if SUMS is not None:
        dw1 = tl.sum(tl.sum(dw1, 1, keep_dims=True), 0, keep_dims=True)
        dw2 = tl.sum(tl.sum(dw2, 1, keep_dims=True), 0, keep_dims=True)
        row = SUMS + tl.program_id(0) * D + tl.zeros([1, 1, 1], tl.int32)
        write_pairs(row, dw1, dw2, True, D, BLOCK, INTERLEAVED)
