"""The sum of two batch normalisations in training, and its gradients, of tensors whose channels are
adjacent in memory: what ends a block of a residual network with a projection beside it.

With mean and var those of a channel over all rows of its tensor, u = (x - mean) / sqrt(var + eps)
and v the same of z: y = act(u · weight + bias + v · z_weight + z_bias). Neither term is written to
memory. With g = dy · act'(…), which is computed in plain torch, dbias and dz_bias are the sum over
rows of g, dweight and dz_weight those of g · u and g · v, and one kernel writes dx and dz, which
have the form that is given in batch_norm_backward.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.inputs import in_layout, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.norm.batch_norm import (
    Columns,
    columns_of,
    of_channels,
    rows_of,
    statistics,
    tile_of_batch,
)
from fusion_backend.kernels.norm.batch_norm_backward import slope_and_offset
from fusion_backend.kernels.norm.weight_sums import add_up


def forward(
    x: Tensor, z: Tensor, weight: Tensor, bias: Tensor, z_weight: Tensor, z_bias: Tensor,
    eps: float, z_eps: float, act: str, columns: Columns | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y `[b, c, ...]`, in memory as x is and of its dtype, and mean and var of x and of z, `[c]` in
    fp32, which are not corrected.

    x and z are `[b, c, ...]` in fp32, bf16 or fp16, and lie alike, their channels adjacent in
    memory; the vectors are `[c]`, contiguous, of any of these dtypes. act is a word of
    common/activations.py. Grids: those of `statistics`, for x and for z; pieces by blocks of
    columns.
    """
    columns = columns or columns_of(x)
    y, moments = torch.empty_like(x), (*statistics(x, columns), *statistics(z, columns))
    vectors = weight, bias, z_weight, z_bias
    launch(
        batch_norm_sum_kernel, columns.grid, x, z, *vectors, *moments, y, rows_of(x), eps, z_eps,
        C=number(x.shape[1]), ACT=act, **columns.constants,
    )  # fmt: skip
    return y, *moments


# Bytes: x and z once, from L2 as far as they fit, y once.
@triton.jit
def batch_norm_sum_kernel(
    X, Z, W, B, ZW, ZB, MEAN, VAR, ZMEAN, ZVAR, Y, rows, eps, z_eps, C: tl.constexpr,
    ACT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, _, scale, bias = of_channels(W, B, MEAN, VAR, column, eps, C, BLOCK)
    zmean, _, zscale, zbias = of_channels(ZW, ZB, ZMEAN, ZVAR, column, z_eps, C, BLOCK)
    tiles = tl.cdiv(rows, ROWS)
    for t in tl.range(piece, tiles, PIECES, num_stages=3):
        at, keep = tile_of_batch(tiles - 1 - t, column, rows, C, BLOCK, ROWS)
        y = (tl.load(X + at, keep, 0.0).to(tl.float32) - mean) * scale + bias
        y += (tl.load(Z + at, keep, 0.0).to(tl.float32) - zmean) * zscale + zbias
        tl.store(Y + at, activated(y, ACT), keep)


def backward(
    dy: Tensor, dmoments: tuple[Tensor | None, ...], x: Tensor, z: Tensor, y: Tensor | None,
    weight: Tensor, bias: Tensor, z_weight: Tensor, z_bias: Tensor, moments: tuple[Tensor, ...],
    eps: float, z_eps: float, needs: tuple[bool, ...], columns: Columns | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, z, weight, bias, z_weight and z_bias, each in memory as that and of its
    dtype; None where `needs` says no, and for z_bias, whose gradient is that of bias.

    moments: mean and var of x and of z, and dmoments their gradients, if any. y is the result of
    relu, which passes the gradient on where y is positive; without relu it is None. Grids: as the
    columns; blocks of columns, twice; as the columns.
    """
    need_x, need_z, need_weight, need_bias, need_z_weight, _ = needs
    c, rows, columns = number(x.shape[1]), rows_of(x), columns or columns_of(x)
    dy = in_layout(x, dy)
    dmoments = tuple(None if d is None else d.contiguous() for d in dmoments)
    if y is not None:
        dy = torch.where(y <= 0, 0, dy)
    sums = torch.empty((2, columns.pieces, c), dtype=torch.float32, device=x.device)
    z_sums = torch.empty((1, columns.pieces, c), dtype=torch.float32, device=x.device)
    sizes = dict(C=c, **columns.constants)
    mean, var, z_mean, z_var = moments
    launch(
        batch_norm_sum_sums_kernel, columns.grid, dy, x, z, mean, var, z_mean, z_var, sums, z_sums,
        rows, eps, z_eps, **sizes,
    )  # fmt: skip
    dweight, dbias = add_up(sums, torch.float32, True, True)
    dz_weight, _ = add_up(z_sums, torch.float32, True, False)
    dx, dz = torch.empty_like(x) if need_x else None, torch.empty_like(z) if need_z else None
    if need_x or need_z:
        launch(
            batch_norm_sum_gradient_kernel, columns.grid, dy, x, z, weight, z_weight, *moments,
            dweight, dz_weight, dbias, *dmoments, dx, dz, rows, eps, z_eps, **sizes,
        )  # fmt: skip
    return (
        dx,
        dz,
        dweight.to(weight.dtype) if need_weight else None,
        dbias.to(bias.dtype) if need_bias else None,
        dz_weight.to(z_weight.dtype) if need_z_weight else None,
        None,
    )


# Bytes: dy, x and z once, 12 a piece and channel.
@triton.jit
def batch_norm_sum_sums_kernel(
    DY, X, Z, MEAN, VAR, ZMEAN, ZVAR, SUMS, ZSUMS, rows, eps, z_eps, C: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, rstd, _, _ = of_channels(None, None, MEAN, VAR, column, eps, C, BLOCK)
    zmean, zrstd, _, _ = of_channels(None, None, ZMEAN, ZVAR, column, z_eps, C, BLOCK)
    gu = tl.zeros([ROWS, BLOCK], tl.float32)
    gv = tl.zeros([ROWS, BLOCK], tl.float32)
    gs = tl.zeros([ROWS, BLOCK], tl.float32)
    for t in tl.range(piece, tl.cdiv(rows, ROWS), PIECES, num_stages=3):
        at, keep = tile_of_batch(t, column, rows, C, BLOCK, ROWS)
        g = tl.load(DY + at, keep, 0.0).to(tl.float32)
        gu += g * (tl.load(X + at, keep, 0.0).to(tl.float32) - mean)
        gv += g * (tl.load(Z + at, keep, 0.0).to(tl.float32) - zmean)
        gs += g
    ch = column * BLOCK + tl.arange(0, BLOCK)
    at, keep = (piece * C + ch)[None, :], (ch < C)[None, :]
    tl.store(SUMS + at, tl.sum(gu, 0, keep_dims=True) * rstd, keep)
    tl.store(SUMS + PIECES * C + at, tl.sum(gs, 0, keep_dims=True), keep)
    tl.store(ZSUMS + at, tl.sum(gv, 0, keep_dims=True) * zrstd, keep)


# Bytes: dy, x and z once, from L2 as far as they fit, dx and dz once.
@triton.jit
def batch_norm_sum_gradient_kernel(
    DY, X, Z, W, ZW, MEAN, VAR, ZMEAN, ZVAR, DW, DZW, DB, DMEAN, DVAR, DZMEAN, DZVAR, DX, DZ, rows,
    eps, z_eps, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    column, piece = tl.program_id(0) % ACROSS, tl.program_id(0) // ACROSS
    mean, rstd, scale, _ = of_channels(W, None, MEAN, VAR, column, eps, C, BLOCK)
    zmean, zrstd, zscale, _ = of_channels(ZW, None, ZMEAN, ZVAR, column, z_eps, C, BLOCK)
    slope, offset = slope_and_offset(DW, DB, DMEAN, DVAR, rstd, scale, column, rows, C, BLOCK)
    zslope, zoffset = slope_and_offset(
        DZW, DB, DZMEAN, DZVAR, zrstd, zscale, column, rows, C, BLOCK
    )
    tiles = tl.cdiv(rows, ROWS)
    for t in tl.range(piece, tiles, PIECES, num_stages=3):
        at, keep = tile_of_batch(tiles - 1 - t, column, rows, C, BLOCK, ROWS)
        g = tl.load(DY + at, keep, 0.0).to(tl.float32)
        if DX is not None:
            distance = tl.load(X + at, keep, 0.0).to(tl.float32) - mean
            tl.store(DX + at, scale * g + (slope * distance + offset), keep)
        if DZ is not None:
            distance = tl.load(Z + at, keep, 0.0).to(tl.float32) - zmean
            tl.store(DZ + at, zscale * g + (zslope * distance + zoffset), keep)
