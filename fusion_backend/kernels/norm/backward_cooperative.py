"""Backward of the normalisations for rows that no program can hold, or only much padded: programs
share them (shared_rows.py).

What stays with a program is a piece of the weight and of its partial sums. Of each row of its group
it reads its piece once; two kernels (norms_backward.py) read everything twice. Pieces are added in
order: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.cooperative_rows import (
    groups_of,
    mailbox,
    publish,
    receive,
    ticket,
)
from fusion_backend.kernels.common.dropout import drawn, dropout_factors
from fusion_backend.kernels.common.inputs import as_rows, maybe_rows, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, partial_sums


def shared_config(n: int) -> Config:
    """16 elements a thread, and as many programs as their registers leave room for
    (`benchmarks.compile_kernels` prints them).
    """
    return Config(1024, 1, 2, 8, 3) if n <= 32768 else Config(2048, 1, 4, 4, 3)


def backward_shared(dy, dh, h, mean, rstd, norm, needs, out, dx, config=None):
    """Fills out, and dx, and returns partial sums, those of each group. Grid: groups of a program a
    piece.
    """
    n = number(h.shape[-1])
    cols, _, warps, programs, stages, _ = config or shared_config(n)
    pieces = triton.cdiv(n, cols)
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = (
        as_rows(dy),
        as_rows(h),
        maybe_rows(dh),
    )
    groups = groups_of(rows, pieces, programs, h.device)
    sums = partial_sums(h, needs, groups)
    seed, chance = drawn(norm.dropout)
    launch(
        norm_backward_shared_kernel, (groups * pieces,), dy, dh, h, norm.weight, mean, rstd, out,
        dx, seed, sums,
        mailbox(rows, pieces, h.device), rows, norm.offset or 0.0, DY_STRIDE=dy_stride,
        DH_STRIDE=dh_stride,
        H_STRIDE=h_stride, N=n, WEIGHT=needs[1], BIAS=needs[2], COLS=cols, PIECES=pieces,
        STAGES=stages,
        num_warps=warps, **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once (and dh), the result once (and dx), 8 a group and column, and a row and
# piece.
@triton.jit
def norm_backward_shared_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, SUMS, MAILBOX, rows, offset, DY_STRIDE: tl.constexpr,
    DH_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    COLS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    started = ticket(MAILBOX, rows, PIECES)
    group, groups, piece = started // PIECES, tl.num_programs(0) // PIECES, started % PIECES
    col = piece * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    seed = 0
    if DX is not None:
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
            products, total = tl.reduce((g * u, g), 0, both)
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
def read_piece(
    DY, H, MEAN, RSTD, row, col, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dy and the normalised h of some columns of a row, and its rstd."""
    g = tl.load(DY + row * DY_STRIDE + col, col < N, 0.0).to(tl.float32)
    u = tl.load(H + row * H_STRIDE + col, col < N, 0.0).to(tl.float32)
    rstd = tl.load(RSTD + row)
    if MEAN is not None:
        u -= tl.load(MEAN + row)
    return g, u * rstd, rstd


@triton.jit
def write_piece(
    d, OUT, DX, seed, row, piece, N: tl.constexpr, COLS: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """The gradient of a piece of a row, and of what was dropped out."""
    col = piece * COLS + tl.arange(0, COLS)
    tl.store(OUT + row * N + col, d, col < N)
    if DX is not None:
        quad = row * ((N + 3) // 4) + piece * (COLS // 4) + tl.arange(0, COLS // 4)
        d *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        tl.store(DX + row * N + col, d, col < N)


@triton.jit
def write_sums(
    SUMS, dw, db, group, groups, col, keep, N: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The partial sums of one of all groups of rows."""
    at = group * N + col
    if WEIGHT:
        tl.store(SUMS + at, dw, keep)
        at += groups * N
    if BIAS:
        tl.store(SUMS + at, db, keep)


@triton.jit
def both(a, b, c, d):
    """Two sums at a time."""
    return a + c, b + d
