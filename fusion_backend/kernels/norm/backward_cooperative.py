"""Backward of a row normalisation for rows that no program can hold, or only much padded: programs
share them (common/cooperative_rows.py).

What stays with a program is a piece of the weight and of its partial sums. Of each row of its group
it reads its piece once; two kernels (backward_long.py) read everything twice. Pieces are added in
order: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.cooperative_rows import (
    groups_of,
    mailbox,
    publish,
    receive,
    ticket,
)
from fusion_backend.kernels.common.dropout import dropout_arguments
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm.operands import Backward
from fusion_backend.kernels.norm.pieces import read_piece, write_piece
from fusion_backend.kernels.norm.weight_sums import partial_sums, write_sums


def config_for(n: int) -> Config:
    """16 elements a thread, and as many programs as their registers leave room for
    (`benchmarks.compile_kernels` prints them).
    """
    return Config(1024, 1, 2, 8, 3) if n <= 32768 else Config(2048, 1, 4, 4, 3)


def backward_cooperative(operands: Backward, config: Config | None = None) -> Tensor | None:
    """Fills operands.out, and dx, and returns the partial sums of the groups.

    Grid: groups of programs, a program for each piece of config.block columns.
    """
    _, _, _, mean, rstd, norm, needs, out, dx = operands
    config = config or config_for(operands.n)
    pieces = triton.cdiv(operands.n, config.block)
    (dy, dh, h), rows, strides = operands.by_rows()
    groups = groups_of(rows, pieces, config.programs, h.device)
    sums = partial_sums(h, needs, groups)
    seed, chance = dropout_arguments(norm.dropout)
    launch(
        norm_backward_shared_kernel, (groups * pieces,),
        dy, dh, h, norm.weight, mean, rstd, out, dx, seed, sums, mailbox(rows, pieces, h.device),
        rows, norm.offset or 0.0, **strides, N=operands.n, WEIGHT=needs[1], BIAS=needs[2],
        COLS=config.block, PIECES=pieces, STAGES=config.stages, num_warps=config.warps, **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once (and dh), the result once (and dx), 8 a group and column, and a row and
# piece.
@triton.jit
def norm_backward_shared_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, SUMS, MAILBOX, rows, offset,
    DY_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    COLS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    started = ticket(MAILBOX, rows, PIECES)
    group, groups, piece = started // PIECES, tl.num_programs(0) // PIECES, started % PIECES
    col = piece * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    seed = 0
    if SEED is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    for i in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        g, u, rstd = read_piece(DY, H, MEAN, RSTD, row, col, DY_STRIDE, H_STRIDE, N)
        if DH is not None:
            own = tl.load(DH + row * DH_STRIDE + col, inside, 0.0)
        if MEAN is not None and N % COLS != 0:
            u = tl.where(inside, u, 0.0)
        if WEIGHT:
            dw += g * u
        if BIAS:
            db += g
        if W is not None:
            g *= w
        if MEAN is not None:
            products, total = tl.reduce((g * u, g), 0, add_pairs)
        else:
            products, total = tl.sum(g * u, 0), 0.0
        before = publish(MAILBOX + row * PIECES + piece, products, total)
        products, total = receive(MAILBOX + row * PIECES, before, PIECES)
        d = g - u * (tl.sum(products, 0) / N)
        if MEAN is not None:
            d -= tl.sum(total, 0) / N
        d *= rstd
        if DH is not None:
            d += own.to(tl.float32)
        write_piece(d, OUT, DX, seed, row, piece, N, COLS, THRESHOLD, SCALE)
    write_sums(SUMS, dw, db, group, groups, col, inside & (group < groups), N, WEIGHT, BIAS)


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at a time."""
    return a + c, b + d
