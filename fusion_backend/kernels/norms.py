"""Layer and RMS normalisation of rows, with or without dropout and a residual sum before it.

forward: h = dropout(x) + residual, or without either; c = h - mean(h), or h itself where `centred` is false;
rstd = 1 / sqrt(mean(c²) + eps); y = c · rstd · (weight + offset) + bias.
backward: with g = dy · (weight + offset) and u = c · rstd, dh = rstd (g - u mean(g u) - mean(g)) + what h itself gets,
without mean(g) where `centred` is false; dweight and dbias are the sums over rows of dy · u and dy: partial sums of
each program, added up by a second kernel. No atomics: the same bits every time. All sums are in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.dropout import Dropout, drawn, dropout_factors
from fusion_backend.kernels.inputs import as_rows, dynamic, maybe_rows, number
from fusion_backend.kernels.launch import launch
from fusion_backend.kernels.rows import MAX_HELD, RESULTS, Config, grid, multiprocessors
from fusion_backend.pattern import Reject

MAX_HELD_BACKWARD = 8192  # elements of a row whose h, dy, weight and two partial sums stay in registers
SHORT = 32768  # bytes of a row up to which holding it pays in any case


def not_forward(x: Tensor) -> Reject | None:
    """Where Inductor's forward is as fast: only the backward kernel pays (RMS norms and sums, bf16, H200)."""
    n = number(x.shape[-1])
    if n * x.element_size() > SHORT or statically_known_true(x.numel() < 4 << 20):
        return Reject(f"Inductor's forward is as fast for long rows and small tensors ({RESULTS})", forward_only=True)


class Norm(NamedTuple):
    """What is computed: weight and bias `[n]` or None, a number added to the weight, layer or RMS, dropout of x."""

    weight: Tensor | None
    bias: Tensor | None
    offset: float | None
    eps: float
    centred: bool
    dropout: Dropout | None = None


def forward(x, residual, norm: Norm, save: bool, config=None):
    """y, h (None without a residual), and mean and rstd `[rows]` in fp32: empty unless saved, mean also if not centred.

    Grid: rows / rows_each, or a few programs a multiprocessor.
    """
    n = number(x.shape[-1])
    block, rows_each, warps, programs, stages, early = config or forward_config(
        n, x.element_size(), residual is not None, norm.dropout
    )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x, rows, stride), (residual, _, residual_stride) = as_rows(x), maybe_rows(residual)
    kept = [save and norm.centred, save]
    mean, rstd = (torch.empty(rows if keep else 0, dtype=torch.float32, device=x.device) for keep in kept)
    held = dict(ROWS=rows_each, STAGES=stages, EARLY=early)
    kernel, rest = (norm_kernel, held) if block >= n else (norm_long_kernel, {})
    seed, chance = drawn(norm.dropout)
    launch(
        kernel, (grid(rows, rows_each, programs, x.device),), x, seed, residual, norm.weight, norm.bias, y, h,
        mean if kept[0] else None, rstd if kept[1] else None, rows, norm.offset or 0.0, norm.eps, STRIDE=stride,
        RESIDUAL_STRIDE=residual_stride, N=n, CENTRED=norm.centred, BLOCK=block, num_warps=warps, **rest, **chance,
    )  # fmt: skip
    return y, h, mean, rstd


# Bytes: x once (and residual), y once (and h), 4 or 8 a row where saved. Dropout moves none.
@triton.jit
def norm_kernel(
    X, SEED, R, W, B, Y, H, MEAN, RSTD, rows, offset, eps, STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    N: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    top, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    col = tl.arange(0, BLOCK)[None, :]
    if EARLY and W is not None:
        w = tl.load(W + col, col < N)
    if EARLY and B is not None:
        b = tl.load(B + col, col < N)
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(rows - top, step), num_stages=STAGES):
        row = (top + i * step + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & (col < N)
        h = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
        if R is not None:
            r = tl.load(R + row * RESIDUAL_STRIDE + col, keep, 0.0).to(tl.float32)
        if SEED is not None:
            seed = tl.load(SEED)
            tl.debug_barrier()  # the loads go first, not after the generator, where ptxas would put them
            h *= dropout_factors(seed, row * ((N + 3) // 4) + tl.arange(0, BLOCK // 4)[None, :], THRESHOLD, SCALE)
        if R is not None:
            h += r
            tl.store(H + row * N + col, h, keep)
        if CENTRED:
            mean = tl.sum(h, 1, keep_dims=True) / N
            h = tl.where(col < N, h - mean, 0.0)
            if MEAN is not None:
                tl.store(MEAN + row, mean, row < rows)
        rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
        y = h * rstd
        if EARLY:
            if W is not None:
                y *= w.to(tl.float32) + tl.cast(offset, tl.float32)
            if B is not None:
                y += b.to(tl.float32)
        elif STAGES == 0 or rows > 0:  # what stands in a branch is not read ahead: only x and the residual are
            if W is not None:
                y *= tl.load(W + col, col < N).to(tl.float32) + tl.cast(offset, tl.float32)
            if B is not None:
                y += tl.load(B + col, col < N).to(tl.float32)
        tl.store(Y + row * N + col, y, keep)
        if RSTD is not None:
            tl.store(RSTD + row, rstd, row < rows)


# Bytes: as above; the second reading of a row comes from L2.
@triton.jit
def norm_long_kernel(
    X, SEED, R, W, B, Y, H, MEAN, RSTD, rows, offset, eps, STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    N: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    means = tl.zeros([BLOCK], tl.float32)  # Welford's running mean and sum of squares, one a lane
    squares = tl.zeros([BLOCK], tl.float32)
    if SEED is not None:
        seed = tl.load(SEED)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        h = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        if SEED is not None:
            quad = row * ((N + 3) // 4) + start // 4 + tl.arange(0, BLOCK // 4)
            h *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        if R is not None:
            h += tl.load(R + row * RESIDUAL_STRIDE + start + lane, keep, 0.0).to(tl.float32)
            tl.store(H + row * N + start + lane, h, keep)
        if CENTRED:
            delta = h - means
            means = tl.where(keep, means + delta * (1.0 / (start // BLOCK + 1)), means)
            squares += tl.where(keep, delta * (h - means), 0.0)
        else:
            squares += h * h
    mean = 0.0
    if CENTRED:
        counts = (N - lane + BLOCK - 1) // BLOCK
        mean = tl.sum(means * counts) / N
        squares += counts * (means - mean) * (means - mean)
        if MEAN is not None:
            tl.store(MEAN + row, mean)
    rstd = tl.rsqrt(tl.sum(squares) / N + tl.cast(eps, tl.float32))
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        h = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        if SEED is not None:
            quad = row * ((N + 3) // 4) + start // 4 + tl.arange(0, BLOCK // 4)
            h *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        if R is not None:
            h += tl.load(R + row * RESIDUAL_STRIDE + start + lane, keep, 0.0).to(tl.float32)
        y = (h - mean) * rstd
        if W is not None:
            y *= tl.load(W + start + lane, keep, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
        if B is not None:
            y += tl.load(B + start + lane, keep, 0.0).to(tl.float32)
        tl.store(Y + row * N + start + lane, y, keep)
    if RSTD is not None:
        tl.store(RSTD + row, rstd)


def backward(dy, dh, h, mean, rstd, norm: Norm, needs, dx=None, config=None):
    """Gradients of h, weight and bias, None where `needs` (three booleans) says no; dh is what h itself gets.

    dx, where it is given, is filled with the gradient of what was dropped out; h must be wanted then.
    """
    n = number(h.shape[-1])
    needs = (needs[0], needs[1] and norm.weight is not None, needs[2] and norm.bias is not None)
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device) if needs[0] else None
    mean = mean if norm.centred else None
    run = backward_short if n <= MAX_HELD_BACKWARD else backward_long
    sums = run(dy, dh, h, mean, rstd, norm, needs, out, dx, config)
    return out, *add_up(sums, h.dtype, *needs[1:])


def forward_config(n: int, itemsize: int, residual: bool, dropout: Dropout | None) -> Config:
    """Longer rows are walked through, sooner without a residual, or with dropout: rows of 64 KB spill (H200, bf16)."""
    block = max(4, triton.next_power_of_2(n))
    if n * itemsize > (MAX_HELD if residual and dropout is None else SHORT):
        return Config(8192, 1, 16)
    return Config(block, max(1, 2048 // block), 4 if block <= 8192 else block // 1024)


def backward_config(n: int) -> tuple[int, int, int, int, int]:
    """BLOCK, rows at a time, warps, programs a multiprocessor, and stages of the loop over rows (swept on an H200)."""
    block = max(4, triton.next_power_of_2(n))
    warps = max(4, block // 512)
    return block, max(1, 2048 // block), warps, max(1, 16 // warps), 3


def partial_sums(h, needs, programs):
    """fp32 partial sums `[weight and bias, programs, n]`; None where nobody asks."""
    count = sum(needs[1:])
    return torch.empty((count, programs, h.shape[-1]), dtype=torch.float32, device=h.device) if count else None


def backward_short(dy, dh, h, mean, rstd, norm, needs, out, dx, config):
    """Each program walks through rows with its partial sums in registers. Grid: a few programs a multiprocessor."""
    n = number(h.shape[-1])
    block, rows_each, warps, programs, stages = config or backward_config(n)
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = as_rows(dy), as_rows(h), maybe_rows(dh)
    programs = grid(rows, rows_each, programs, h.device)
    sums = partial_sums(h, needs, programs)
    seed, chance = drawn(norm.dropout)
    launch(
        norm_backward_kernel, (programs,), dy, dh, h, norm.weight, mean, rstd, out, dx, seed, sums, rows,
        norm.offset or 0.0, DY_STRIDE=dy_stride, DH_STRIDE=dh_stride, H_STRIDE=h_stride, N=n, WEIGHT=needs[1],
        BIAS=needs[2], BLOCK=block, ROWS=rows_each, STAGES=stages, num_warps=warps, **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once (and dh), the result once (and dx), 8 a program and column.
@triton.jit
def norm_backward_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, SUMS, rows, offset, DY_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if DX is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    for top in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
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
            d = g - u * (tl.sum(g * u, 1, keep_dims=True) / N)
            if MEAN is not None:
                d -= tl.sum(g, 1, keep_dims=True) / N
            d *= rstd
            if DH is not None:
                d += tl.load(DH + row * DH_STRIDE + col, keep, 0.0).to(tl.float32)
            tl.store(OUT + row * N + col, d, keep)
            if DX is not None:
                d *= dropout_factors(seed, row * ((N + 3) // 4) + tl.arange(0, BLOCK // 4)[None, :], THRESHOLD, SCALE)
                tl.store(DX + row * N + col, d, keep)
    at = tl.program_id(0) * N + col
    if WEIGHT:
        tl.store(SUMS + at, tl.sum(dw, 0, keep_dims=True), inside)
        at += tl.num_programs(0) * N
    if BIAS:
        tl.store(SUMS + at, tl.sum(db, 0, keep_dims=True), inside)


def backward_long(dy, dh, h, mean, rstd, norm, needs, out, dx, config):
    """Two passes: the two means of every row, then the results, block of columns by block of columns."""
    n = number(h.shape[-1])
    cols, warps, programs, stages = config or (2048, 8, 4, 3)
    blocks = (n + cols - 1) // cols
    programs = max(1, multiprocessors(h.device) * programs // blocks)
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = as_rows(dy), as_rows(h), maybe_rows(dh)
    if not dynamic(rows):
        programs = min(programs, rows)
    sums = partial_sums(h, needs, programs)
    means = torch.empty((2, rows), dtype=torch.float32, device=h.device) if needs[0] else None
    args, strides = (h, norm.weight, mean, rstd, means), dict(DY_STRIDE=dy_stride, H_STRIDE=h_stride)
    if needs[0]:
        launch(
            norm_backward_means_kernel, (rows,), dy, *args, rows, norm.offset or 0.0, N=n, BLOCK=2048, num_warps=8,
            **strides,
        )  # fmt: skip
    seed, chance = drawn(norm.dropout)
    launch(
        norm_backward_columns_kernel, (blocks, programs), dy, dh, *args, out, dx, seed, sums, rows, norm.offset or 0.0,
        DH_STRIDE=dh_stride, N=n, WEIGHT=needs[1], BIAS=needs[2], COLS=cols, STAGES=stages, num_warps=warps, **strides,
        **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once.
@triton.jit
def norm_backward_means_kernel(
    DY, H, W, MEAN, RSTD, MEANS, rows, offset, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
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
        products += g * (tl.load(H + row * H_STRIDE + start + lane, keep, 0.0).to(tl.float32) - mean)
        sums += g
    tl.store(MEANS + row, tl.sum(products) * tl.load(RSTD + row) / N)
    if MEAN is not None:
        tl.store(MEANS + rows + row, tl.sum(sums) / N)


# Bytes: dy and h once more (and dh), the result once (and dx), 8 a program and column.
@triton.jit
def norm_backward_columns_kernel(
    DY, DH, H, W, MEAN, RSTD, MEANS, OUT, DX, SEED, SUMS, rows, offset, DY_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    if DX is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    for i in tl.range(tl.program_id(1), rows, tl.num_programs(1), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        g = tl.load(DY + row * DY_STRIDE + col, inside, 0.0).to(tl.float32)
        u = tl.load(H + row * H_STRIDE + col, inside, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        if MEAN is not None:
            u -= tl.load(MEAN + row)
        u *= rstd
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
            tl.store(OUT + row * N + col, d, inside)
            if DX is not None:
                quad = row * ((N + 3) // 4) + tl.program_id(0) * (COLS // 4) + tl.arange(0, COLS // 4)
                d *= dropout_factors(seed, quad, THRESHOLD, SCALE)
                tl.store(DX + row * N + col, d, inside)
    at = tl.program_id(1) * N + col
    if WEIGHT:
        tl.store(SUMS + at, dw, inside)
        at += tl.num_programs(1) * N
    if BIAS:
        tl.store(SUMS + at, db, inside)


def add_up(sums, dtype, weight: bool, bias: bool):
    """Partial sums of all programs to the gradients."""
    if sums is None:
        return None, None
    _, programs, n = sums.shape
    dw, db = (torch.empty(n, dtype=dtype, device=sums.device) if need else None for need in (weight, bias))
    launch(add_up_kernel, ((n + 31) // 32,), sums, dw, db, programs, N=n, COLS=32, ROWS=64, num_warps=4)
    return dw, db


# Bytes: 4 a program and column, for each of the two.
@triton.jit
def add_up_kernel(SUMS, DW, DB, programs, N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    col = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for top in tl.range(0, programs, ROWS):
        row = top + tl.arange(0, ROWS)[:, None]
        at, keep = SUMS + row * N + col, (row < programs) & inside
        if DW is not None:
            dw += tl.load(at, keep, 0.0)
            at += programs * N
        if DB is not None:
            db += tl.load(at, keep, 0.0)
    if DW is not None:
        tl.store(DW + col, tl.sum(dw, 0, keep_dims=True), inside)
    if DB is not None:
        tl.store(DB + col, tl.sum(db, 0, keep_dims=True), inside)
