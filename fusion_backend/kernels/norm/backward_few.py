"""Backward of a row normalisation of few rows, in one kernel: some programs have a row, others a
block of columns, of which they sum up the gradients of weight and bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.dropout import dropout_arguments
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.norm.backward_short import backward_config, write_gradient
from fusion_backend.kernels.norm.operands import Backward


def backward_few(
    operands: Backward, warps: int | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Fills operands.out, and dx, and returns the gradients of weight and bias.

    Grid: blocks of 64 columns, if a gradient is wanted, and rows, if theirs is.
    """
    _, _, _, mean, rstd, norm, needs, out, dx = operands
    n, config = operands.n, backward_config(operands.n)
    (dy, dh, h), rows, strides = operands.by_rows()
    dw, db = (
        torch.empty(n, dtype=norm.dtype_of_vectors(h), device=h.device) if need else None
        for need in needs[1:]
    )
    blocks = (n + 63) // 64 if any(needs[1:]) else 0
    seed, chance = dropout_arguments(norm.dropout)
    if any(needs):
        launch(
            norm_backward_few_kernel, (blocks + (rows if needs[0] else 0),),
            dy, dh, h, norm.weight, mean, rstd, out, dx, dw, db, seed, rows, norm.offset or 0.0,
            **strides, N=n, BLOCK=config.block, BLOCKS=blocks, COLS=64, ROWS=64,
            num_warps=warps or config.warps, **chance,
        )  # fmt: skip
    return dw, db


# Bytes: dy and h once, and once more from L2 (and dh once), the result once (and dx), 2 or 4 a
# column for each of two.
@triton.jit
def norm_backward_few_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, DW, DB, SEED, rows, offset,
    DY_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < BLOCKS:
        column_sums(
            DY, H, MEAN, RSTD, DW, DB, tl.program_id(0), rows, DY_STRIDE, H_STRIDE, N, COLS, ROWS
        )
    elif OUT is not None:
        row = tl.program_id(0) - BLOCKS
        whole_row(
            DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, row, rows, offset,
            DY_STRIDE, DH_STRIDE, H_STRIDE, N, BLOCK, THRESHOLD, SCALE,
        )  # fmt: skip


@triton.jit
def column_sums(
    DY, H, MEAN, RSTD, DW, DB, block, rows, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr,
    N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias, of a block of columns."""
    col = (block * COLS + tl.arange(0, COLS))[None, :]
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for top in tl.range(0, rows, ROWS):
        row = (top + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & (col < N)
        g = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        db += g
        if DW is not None:
            u = tl.load(H + row * H_STRIDE + col, keep, 0.0).to(tl.float32)
            if MEAN is not None:
                u -= tl.load(MEAN + row, row < rows, 0.0)
            dw += g * (u * tl.load(RSTD + row, row < rows, 0.0))
    if DW is not None:
        tl.store(DW + col, tl.sum(dw, 0, keep_dims=True), col < N)
    if DB is not None:
        tl.store(DB + col, tl.sum(db, 0, keep_dims=True), col < N)


@triton.jit
def whole_row(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, row, rows, offset,
    DY_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradient of one row."""
    row = (row + tl.arange(0, 1))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    g = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
    u = tl.load(H + row * H_STRIDE + col, keep, 0.0).to(tl.float32)
    rstd = tl.load(RSTD + row, row < rows, 0.0)
    if W is not None:
        g *= tl.load(W + col, keep, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    if MEAN is not None:
        u = tl.where(col < N, u - tl.load(MEAN + row, row < rows, 0.0), 0.0)
    u *= rstd
    seed = 0
    if SEED is not None:
        seed = tl.load(SEED)
    write_gradient(
        g, u, rstd, row, keep, MEAN, DH, OUT, DX, seed, DH_STRIDE, N, BLOCK, THRESHOLD, SCALE
    )
