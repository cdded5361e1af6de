"""A piece of a row, for the kernels in which a program has no whole row: what is read, summed up
and written of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.dropout import dropout_factors


@triton.jit
def read_h(
    X, SEED, R, row, piece, STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """h of a piece in fp32: what the norm is taken of, x through its dropout plus the residual."""
    col = piece * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(X + row * STRIDE + col, col < N, 0.0).to(tl.float32)
    if SEED is not None:
        quad = row * ((N + 3) // 4) + piece * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        h *= dropout_factors(tl.load(SEED), quad, THRESHOLD, SCALE)
    if R is not None:
        h += tl.load(R + row * RESIDUAL_STRIDE + col, col < N, 0.0).to(tl.float32)
    return h


@triton.jit
def read_piece(
    DY, H, MEAN, RSTD, row, col,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
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
    d, OUT, DX, seed, row, piece,
    N: tl.constexpr, COLS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The gradient of a piece of a row goes to OUT, and through the dropout, if any, to DX."""
    col = piece * COLS + tl.arange(0, COLS)
    tl.store(OUT + row * N + col, d, col < N)
    if DX is not None:
        if THRESHOLD > 0:
            quad = row * ((N + 3) // 4) + piece * (COLS // 4) + tl.arange(0, COLS // 4)
            d *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        tl.store(DX + row * N + col, d, col < N)
