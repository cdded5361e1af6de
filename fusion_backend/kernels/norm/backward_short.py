"""Backward of a row normalisation whose rows a program holds: programs walk through rows with their
partial sums of weight and bias in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.dropout import dropout_arguments, dropout_factors
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, grid
from fusion_backend.kernels.common.vectors import row_vector
from fusion_backend.kernels.norm.operands import Backward
from fusion_backend.kernels.norm.weight_sums import partial_sums


def backward_config(n: int) -> Config:
    """16 elements a thread, but at least four warps (swept on an H200)."""
    block = max(4, triton.next_power_of_2(n))
    warps = max(4, block // 512)
    return Config(block, max(1, 2048 // block), warps, max(1, 16 // warps), 3)


def backward_short(operands: Backward, config: Config | None = None) -> Tensor | None:
    """Fills operands.out, and dx, and returns the partial sums of the programs.

    Grid: config.programs a multiprocessor.
    """
    _, _, _, mean, rstd, norm, needs, out, dx = operands
    config = config or operands.config("", backward_config(operands.n))
    (dy, dh, h), rows, strides = operands.by_rows()
    programs = grid(rows, config.rows, config.programs, h.device)
    sums = partial_sums(h, needs, programs)
    seed, chance = dropout_arguments(norm.dropout)
    launch(
        norm_backward_kernel, (programs,),
        dy, dh, h, norm.weight, mean, rstd, out, dx, seed, sums, rows, norm.offset or 0.0,
        **strides, N=operands.n, WEIGHT=needs[1], BIAS=needs[2],
        BLOCK=config.block, ROWS=config.rows, STAGES=config.stages, num_warps=config.warps,
        **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once (and dh), the result once (and dx), 8 a program and column.
@triton.jit
def norm_backward_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, SUMS, rows, offset,
    DY_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    seed = 0
    if SEED is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = row_vector(W, tl.arange(0, BLOCK), N).to(tl.float32) + tl.cast(offset, tl.float32)
    for top in tl.range(
        tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES
    ):
        row = (top + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & inside
        g = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        u = tl.load(H + row * H_STRIDE + col, keep, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, row < rows, 0.0)
        if MEAN is not None:
            u = tl.where(inside, u - tl.load(MEAN + row, row < rows, 0.0), 0.0)
        u *= rstd
        if WEIGHT:
            dw += g * u
        if BIAS:
            db += g
        if OUT is not None:
            if W is not None:
                g *= w
            write_gradient(
                g, u, rstd, row, keep, MEAN, DH, OUT, DX, seed,
                DH_STRIDE, N, BLOCK, THRESHOLD, SCALE,
            )  # fmt: skip
    at = tl.program_id(0) * N + col
    if WEIGHT:
        tl.store(SUMS + at, tl.sum(dw, 0, keep_dims=True), inside)
        at += tl.num_programs(0) * N
    if BIAS:
        tl.store(SUMS + at, tl.sum(db, 0, keep_dims=True), inside)


@triton.jit
def write_gradient(
    g, u, rstd, row, keep, MEAN, DH, OUT, DX, seed,
    DH_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradient of whole rows goes to OUT, and through the dropout, if any, to DX."""
    col = tl.arange(0, BLOCK)[None, :]
    d = gradient_of_rows(g, u, rstd, MEAN, N)
    if DH is not None:
        d += tl.load(DH + row * DH_STRIDE + col, keep, 0.0).to(tl.float32)
    tl.store(OUT + row * N + col, d, keep)
    if DX is not None:
        if THRESHOLD > 0:
            d *= dropout_factors(
                seed, row * ((N + 3) // 4) + tl.arange(0, BLOCK // 4)[None, :], THRESHOLD, SCALE
            )
        tl.store(DX + row * N + col, d, keep)


@triton.jit
def gradient_of_rows(g, u, rstd, MEAN, N: tl.constexpr):
    """The gradient of whole rows, of which u, normalised, has the gradient g; MEAN is None where
    they are not centred.
    """
    d = g - u * (tl.sum(g * u, 1, keep_dims=True) / N)
    if MEAN is not None:
        d -= tl.sum(g, 1, keep_dims=True) / N
    return d * rstd
