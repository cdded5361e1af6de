"""Backward of a row normalisation whose rows no program holds, in two kernels: the two means of
every row, then the results, block of columns by block of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.dropout import dropout_arguments
from fusion_backend.kernels.common.inputs import dynamic
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, multiprocessors
from fusion_backend.kernels.norm.operands import Backward
from fusion_backend.kernels.norm.pieces import read_piece, write_piece
from fusion_backend.kernels.norm.weight_sums import partial_sums, write_sums


def backward_long(operands: Backward, config: Config | None = None) -> Tensor | None:
    """Fills operands.out, and dx, and returns the partial sums of the programs.

    Grid: rows for the means; then blocks of config.block columns, and config.programs a
    multiprocessor over all blocks.
    """
    _, _, _, mean, rstd, norm, needs, out, dx = operands
    n = operands.n
    config = config or operands.config(" by columns", Config(1024, 1, 4, 4, 4))
    blocks = (n + config.block - 1) // config.block
    (dy, dh, h), rows, strides = operands.by_rows()
    programs = max(1, multiprocessors(h.device) * config.programs // blocks)
    programs = programs if dynamic(rows) else min(programs, rows)
    sums = partial_sums(h, needs, programs)
    means = torch.empty((2, rows), dtype=torch.float32, device=h.device) if needs[0] else None
    dh_stride = strides.pop("DH_STRIDE")
    args = h, norm.weight, mean, rstd, means
    if needs[0]:
        launch(
            norm_backward_means_kernel, (rows,), dy, *args, rows, norm.offset or 0.0,
            N=n, **strides, **means_config(h, rows),
        )  # fmt: skip
    seed, chance = dropout_arguments(norm.dropout)
    launch(
        norm_backward_columns_kernel, (blocks, programs),
        dy, dh, *args, out, dx, seed, sums, rows, norm.offset or 0.0,
        **strides, DH_STRIDE=dh_stride, N=n, WEIGHT=needs[1], BIAS=needs[2],
        COLS=config.block, STAGES=config.stages, num_warps=config.warps, **chance,
    )  # fmt: skip
    return sums


def means_config(h, rows) -> dict:
    """A row that has a multiprocessor to itself gets all its threads, or in fp32, where they would
    spill, half.
    """
    if dynamic(rows) or rows > multiprocessors(h.device):
        return dict(BLOCK=2048, num_warps=8)
    return (
        dict(BLOCK=16384, num_warps=32) if h.element_size() == 2 else dict(BLOCK=8192, num_warps=16)
    )


# Bytes: dy and h once. The first rows last: the other kernel begins with them.
@triton.jit
def norm_backward_means_kernel(
    DY, H, W, MEAN, RSTD, MEANS, rows, offset,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    if MEAN is not None:
        mean = tl.load(MEAN + row)
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        g = tl.load(DY + row * DY_STRIDE + start + lane, keep, 0.0).to(tl.float32)
        if W is not None:
            g *= tl.load(W + start + lane, keep, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
        products += g * (
            tl.load(H + row * H_STRIDE + start + lane, keep, 0.0).to(tl.float32) - mean
        )
        sums += g
    tl.store(MEANS + row, tl.sum(products) * tl.load(RSTD + row) / N)
    if MEAN is not None:
        tl.store(MEANS + rows + row, tl.sum(sums) / N)


# Bytes: dy and h once more (and dh), the result once (and dx), 8 a program and column.
@triton.jit
def norm_backward_columns_kernel(
    DY, DH, H, W, MEAN, RSTD, MEANS, OUT, DX, SEED, SUMS, rows, offset,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    seed = 0
    if SEED is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    for i in tl.range(tl.program_id(1), rows, tl.num_programs(1), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        g, u, rstd = read_piece(DY, H, MEAN, RSTD, row, col, DY_STRIDE, H_STRIDE, N)
        if WEIGHT:
            dw += g * u
        if BIAS:
            db += g
        if OUT is not None:
            if W is not None:
                g *= w
            d = g - u * tl.load(MEANS + row)
            if MEAN is not None:
                d -= tl.load(MEANS + rows + row)
            d *= rstd
            if DH is not None:
                d += tl.load(DH + row * DH_STRIDE + col, inside, 0.0).to(tl.float32)
            write_piece(d, OUT, DX, seed, row, tl.program_id(0), N, COLS, THRESHOLD, SCALE)
    write_sums(SUMS, dw, db, tl.program_id(1), tl.num_programs(1), col, inside, N, WEIGHT, BIAS)
