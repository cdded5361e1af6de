"""Gradients of batch normalisation in training (batch_norm.py).

With u = (x - mean) · rstd, z its affine function plus the residual and g = dy · act'(z): dweight
and dbias are the sums over rows of g · u and g, dresidual = g, and dx = rstd · weight · (g -
mean(g) - u · mean(g · u)), with means over the rows. A first kernel sums up, and writes dresidual
where somebody wants it, which the last kernel then reads in place of dy and y. With g computed by
Inductor in front of both kernels, two bottlenecks of a ResNet were slower on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import in_layout, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.norm.batch_norm import (
    Columns,
    columns_of,
    of_channels,
    rows_of,
    tile_of_batch,
)
from fusion_backend.kernels.norm.group_norm_backward import through_silu
from fusion_backend.kernels.norm.weight_sums import add_up


def backward(
    dy: Tensor, dmean: Tensor | None, dvar: Tensor | None, x: Tensor, y: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float, act: str,
    needs: tuple[bool, bool, bool, bool], columns: Columns | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x and residual `[b, c, ...]`, in memory as x is and of its dtype, and of weight
    and bias `[c]`, in theirs; None where `needs` says no. That of residual is None, too, where it
    is dy.

    dy is copied where it does not lie as x; dmean and dvar `[c]` are the gradients of mean and var,
    if any. y is the result where relu stands behind a residual: relu passes the gradient on where y
    is positive. Otherwise y is None, and the gradient of the activation is computed from z, which
    is computed again. Grids as in the forward.
    """
    need_x, need_residual, need_weight, need_bias = needs
    c, rows, columns, dy = (
        number(x.shape[1]),
        rows_of(x),
        columns or columns_of(x),
        in_layout(x, dy),
    )
    dmean, dvar = (None if d is None else d.contiguous() for d in (dmean, dvar))
    sums = torch.empty((2, columns.pieces, c), dtype=torch.float32, device=x.device)
    vectors, sizes = (weight, bias, mean, var), dict(C=c, **columns.constants)
    dresidual = None
    if need_residual and act != "identity":
        dresidual = torch.empty_like(x)
    launch(
        batch_norm_sums_kernel, columns.grid, dy, x, y, *vectors, sums, dresidual, rows, eps,
        ACT=act, **sizes,
    )  # fmt: skip
    dweight, dbias = add_up(sums, torch.float32, True, True)
    dx = None
    if need_x:
        dx = torch.empty_like(x)
        if dresidual is not None:
            dy, y, act = dresidual, None, "identity"
        launch(
            batch_norm_gradient_kernel, columns.grid, dy, x, y, *vectors, dweight, dbias, dmean,
            dvar, dx, rows, eps, ACT=act, **sizes,
        )  # fmt: skip
    dweight = dweight.to(weight.dtype) if need_weight else None
    return dx, dresidual, dweight, dbias.to(bias.dtype) if need_bias else None


# Bytes: dy and x once (and y, and dresidual), 8 a piece and channel.
@triton.jit
def batch_norm_sums_kernel(
    DY, X, Y, W, B, MEAN, VAR, SUMS, DR, rows, eps, ACT: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, rstd, scale, bias = of_channels(W, B, MEAN, VAR, column, eps, C, BLOCK)
    gu = tl.zeros([ROWS, BLOCK], tl.float32)
    gs = tl.zeros([ROWS, BLOCK], tl.float32)
    for t in tl.range(piece, tl.cdiv(rows, ROWS), PIECES, num_stages=3):
        at, keep = tile_of_batch(t, column, rows, C, BLOCK, ROWS)
        g, distance = before_act(DY, X, Y, at, keep, mean, scale, bias, ACT)
        gu += g * distance
        gs += g
        if DR is not None:
            tl.store(DR + at, g, keep)
    ch = column * BLOCK + tl.arange(0, BLOCK)
    gu = tl.sum(gu, 0, keep_dims=True) * rstd
    tl.store(SUMS + (piece * C + ch)[None, :], gu, (ch < C)[None, :])
    tl.store(SUMS + (PIECES + piece) * C + ch, tl.sum(gs, 0), ch < C)


# Bytes: dy and x once (and y), from L2 as far as they fit, dx once.
@triton.jit
def batch_norm_gradient_kernel(
    DY, X, Y, W, B, MEAN, VAR, DW, DB, DMEAN, DVAR, DX, rows, eps, ACT: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, rstd, scale, bias = of_channels(W, B, MEAN, VAR, column, eps, C, BLOCK)
    slope, offset = slope_and_offset(DW, DB, DMEAN, DVAR, rstd, scale, column, rows, C, BLOCK)
    tiles = tl.cdiv(rows, ROWS)
    for t in tl.range(piece, tiles, PIECES, num_stages=3):
        at, keep = tile_of_batch(tiles - 1 - t, column, rows, C, BLOCK, ROWS)
        g, distance = before_act(DY, X, Y, at, keep, mean, scale, bias, ACT)
        tl.store(DX + at, scale * g + (slope * distance + offset), keep)


@triton.jit
def before_act(DY, X, Y, at, keep, mean, scale, bias, ACT: tl.constexpr):
    """g of a tile, 0 outside, and x - mean."""
    distance = tl.load(X + at, keep, 0.0).to(tl.float32) - mean
    g = tl.load(DY + at, keep, 0.0).to(tl.float32)
    if Y is not None:
        g = tl.where(tl.load(Y + at, keep, 0.0) <= 0.0, 0.0, g)
    elif ACT == "relu":
        g = tl.where(distance * scale + bias <= 0.0, 0.0, g)
    elif ACT == "relu6" or ACT == "hardswish":
        # with the edges where they are for a z in 16 bits, as the graph has it
        z = (distance * scale + bias).to(DY.dtype.element_ty).to(tl.float32)
        if ACT == "relu6":
            g = tl.where((z <= 0.0) | (z >= 6.0), 0.0, g)
        else:
            g = tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, g * (z * 0.33333334 + 0.5), g))
    elif ACT == "silu":
        g = through_silu(g, distance * scale + bias)
    return g, distance


@triton.jit
def slope_and_offset(
    DW, DB, DMEAN, DVAR, rstd, scale, column, rows, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a block of columns, as rows: dx = scale · g + slope · (x - mean) + offset."""
    ch, one = (column * BLOCK + tl.arange(0, BLOCK))[None, :], 1.0 / rows
    slope = -scale * rstd * tl.load(DW + ch, ch < C, 0.0) * one
    offset = -scale * tl.load(DB + ch, ch < C, 0.0) * one
    if DMEAN is not None:
        offset += tl.load(DMEAN + ch, ch < C, 0.0) * one
    if DVAR is not None:
        slope += tl.load(DVAR + ch, ch < C, 0.0) * (2.0 * one)
    return slope, offset
