"""Forward of row normalisations for long rows that are fewer than the multiprocessors.

Each row is split over several programs, in two kernels: moments of the pieces, and h where it is
wanted; then the results, each program merging the moments of its row. The second reading comes from
L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusion_backend.kernels.common.inputs import dynamic
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.norm.operands import Forward
from fusion_backend.kernels.norm.pieces import read_h

LONG = 1 << 16  # elements of the shortest row that is split
PIECE, WARPS = 8192, 16  # elements of a piece, 16 a thread


def few_long_rows(rows, n: int, device: torch.device) -> bool:
    """Would a program a row leave multiprocessors without work?"""
    return n >= LONG and not dynamic(rows) and rows < multiprocessors(device)


def forward(operands: Forward, config: tuple[int, int] | None = None, **constants) -> None:
    """Fills what operands.Forward says; constants are those that all forward kernels take, config
    the elements of a piece and warps. Grid, of two kernels: pieces of all rows.
    """
    x, seed, residual, weight, bias, y, h, mean, rstd, rows, offset, eps = operands
    piece, warps = config or (PIECE, WARPS)
    pieces = (constants["N"] + piece - 1) // piece
    parts = torch.empty((2, rows, pieces), dtype=torch.float32, device=x.device)
    constants |= dict(BLOCK=piece, PIECES=pieces, num_warps=warps)
    launch(norm_moments_kernel, (rows * pieces,), x, seed, residual, h, parts, rows, **constants)
    launch(
        norm_apply_kernel, (rows * pieces,), x, seed, residual, weight, bias, parts, y, mean, rstd,
        rows, offset, eps, PARTS_BLOCK=triton.next_power_of_2(pieces), **constants,
    )  # fmt: skip


# Bytes: x once (and residual), h once where it is wanted, 8 a piece.
@triton.jit
def norm_moments_kernel(
    X, SEED, R, H, PARTS, rows,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, piece = (tl.program_id(0) // PIECES).to(tl.int64), tl.program_id(0) % PIECES
    col = piece * BLOCK + tl.arange(0, BLOCK)
    h = read_h(X, SEED, R, row, piece, STRIDE, RESIDUAL_STRIDE, N, BLOCK, THRESHOLD, SCALE)
    if H is not None:
        tl.store(H + row * N + col, h, col < N)
    if CENTRED:
        mean = tl.sum(h) / tl.minimum(N - piece * BLOCK, BLOCK)
        h = tl.where(col < N, h - mean, 0.0)
        tl.store(PARTS + tl.program_id(0), mean)
    tl.store(PARTS + rows * PIECES + tl.program_id(0), tl.sum(h * h))


# Bytes: x once more (and residual), from L2 as far as they fit, y once, 4 or 8 a row where saved, 8
# a piece and each piece of its row.
@triton.jit
def norm_apply_kernel(
    X, SEED, R, W, B, PARTS, Y, MEAN, RSTD, rows, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is the nearest
    row, piece = (program // PIECES).to(tl.int64), program % PIECES
    col = piece * BLOCK + tl.arange(0, BLOCK)
    h = read_h(X, SEED, R, row, piece, STRIDE, RESIDUAL_STRIDE, N, BLOCK, THRESHOLD, SCALE)
    part = tl.arange(0, PARTS_BLOCK)
    squares = tl.load(PARTS + (rows + row) * PIECES + part, part < PIECES, 0.0)
    if CENTRED:
        means = tl.load(PARTS + row * PIECES + part, part < PIECES, 0.0)
        counts = tl.where(part < PIECES, tl.minimum(N - part * BLOCK, BLOCK), 0)
        mean = tl.sum(means * counts) / N
        squares += counts * (means - mean) * (means - mean)
        h -= mean
        if MEAN is not None:
            if piece == 0:
                tl.store(MEAN + row, mean)
    rstd = tl.rsqrt(tl.sum(squares) / N + tl.cast(eps, tl.float32))
    if RSTD is not None:
        if piece == 0:
            tl.store(RSTD + row, rstd)
    y = h * rstd
    if W is not None:
        y *= tl.load(W + col, col < N, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    if B is not None:
        y += tl.load(B + col, col < N, 0.0).to(tl.float32)
    tl.store(Y + row * N + col, y, col < N)
