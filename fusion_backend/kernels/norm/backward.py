"""Backward of the normalisations in norms.py: gradients of the rows, of the weight and of the bias.

With g = dy · (weight + offset) and u = c · rstd, dh = rstd (g - u mean(g u) - mean(g)) + what h
itself gets, without mean(g) where the norm is not centred; dx = dh through the dropout. dweight and
dbias are the sums over rows of dy · u and dy: partial sums of each program, added up by a second
kernel, in order: the same bits every time. Sums in fp32. Of few rows, where a second kernel would
cost as much as the first, some programs have a row and others columns. Rows that a program cannot
hold are shared by programs (norms_backward_shared.py), or read twice, by two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.dropout import drawn, dropout_factors
from fusion_backend.kernels.common.inputs import as_rows, dynamic, maybe_rows, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, grid, multiprocessors, partial_sums, tuned
from fusion_backend.kernels.norm.backward_cooperative import (
    backward_shared,
    read_piece,
    shared_config,
    write_piece,
    write_sums,
)
from fusion_backend.kernels.norm.forward import Norm

# elements of a row whose h, dy, weight and two partial sums stay in registers
MAX_HELD_BACKWARD = 8192
# up to which dy and h are read twice, the second time from L2, by one kernel
FEW_ROWS, FEW_ELEMENTS = 256, 1 << 21


def backward(dy, dh, h, mean, rstd, norm: Norm, needs, dx=None, config=None):
    """Gradients of h, weight and bias, None where `needs` (three booleans) says no; dh is what h
    itself gets.

    dx, where it is given, is filled with the gradient of what was dropped out; h must be wanted
    then.
    """
    n = number(h.shape[-1])
    needs = (needs[0], needs[1] and norm.weight is not None, needs[2] and norm.bias is not None)
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device) if needs[0] else None
    mean = mean if norm.centred else None
    if config is None and few(h):
        return out, *backward_few(dy, dh, h, mean, rstd, norm, needs, out, dx)
    run = backward_short if n <= MAX_HELD_BACKWARD else backward_long
    if config is None and needs[0] and better_shared(n, norm) and shareable(h, shared_config(n)):
        run = backward_shared
    sums = run(dy, dh, h, mean, rstd, norm, needs, out, dx, config)
    return out, *add_up(sums, h.dtype, *needs[1:])


def better_shared(n: int, norm: Norm) -> bool:
    """Rows that do not fit, or would have random numbers drawn for a third more columns than there
    are.
    """
    return n > MAX_HELD_BACKWARD or (
        norm.dropout is not None and 2048 < n <= triton.next_power_of_2(n) * 3 // 4
    )


def backward_config(n: int) -> Config:
    """16 elements a thread, but at least four warps (swept on an H200)."""
    block = max(4, triton.next_power_of_2(n))
    warps = max(4, block // 512)
    return Config(block, max(1, 2048 // block), warps, max(1, 16 // warps), 3)


def few(h) -> bool:
    n = number(h.shape[-1])
    rows = h.numel() // n
    return (
        n <= MAX_HELD_BACKWARD
        and not dynamic(rows)
        and 0 < rows <= FEW_ROWS
        and rows * n <= FEW_ELEMENTS
    )


def chosen(h, dh, norm, suffix: str, rule: Config) -> Config:
    """From the table, for the two norms that have been swept."""
    n = number(h.shape[-1])
    if not norm.centred or (dh is not None and norm.dropout is None):
        return rule
    kernel = "layer_norm" if norm.dropout is None else "dropout_add_layer_norm"
    return tuned(f"{kernel} backward{suffix}", h.numel() // n, n, h.element_size(), rule)


def backward_short(dy, dh, h, mean, rstd, norm, needs, out, dx, config):
    """Each program walks through rows with its partial sums in registers. Grid: a few programs a
    multiprocessor.
    """
    n = number(h.shape[-1])
    block, rows_each, warps, programs, stages, _ = config or chosen(
        h, dh, norm, "", backward_config(n)
    )
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = (
        as_rows(dy),
        as_rows(h),
        maybe_rows(dh),
    )
    programs = grid(rows, rows_each, programs, h.device)
    sums = partial_sums(h, needs, programs)
    seed, chance = drawn(norm.dropout)
    launch(
        norm_backward_kernel, (programs,), dy, dh, h, norm.weight, mean, rstd, out, dx, seed, sums,
        rows,
        norm.offset or 0.0, DY_STRIDE=dy_stride, DH_STRIDE=dh_stride, H_STRIDE=h_stride, N=n,
        WEIGHT=needs[1],
        BIAS=needs[2], BLOCK=block, ROWS=rows_each, STAGES=stages, num_warps=warps, **chance,
    )  # fmt: skip
    return sums


# Bytes: dy and h once (and dh), the result once (and dx), 8 a program and column.
@triton.jit
def norm_backward_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, SUMS, rows, offset, DY_STRIDE: tl.constexpr,
    DH_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    seed = 0
    if DX is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
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
            gradient(
                g,
                u,
                rstd,
                row,
                keep,
                MEAN,
                DH,
                OUT,
                DX,
                seed,
                DH_STRIDE,
                N,
                BLOCK,
                THRESHOLD,
                SCALE,
            )
    at = tl.program_id(0) * N + col
    if WEIGHT:
        tl.store(SUMS + at, tl.sum(dw, 0, keep_dims=True), inside)
        at += tl.num_programs(0) * N
    if BIAS:
        tl.store(SUMS + at, tl.sum(db, 0, keep_dims=True), inside)


@triton.jit
def gradient(
    g, u, rstd, row, keep, MEAN, DH, OUT, DX, seed, DH_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Of whole rows: stored in OUT, and through the dropout in DX."""
    col = tl.arange(0, BLOCK)[None, :]
    d = g - u * (tl.sum(g * u, 1, keep_dims=True) / N)
    if MEAN is not None:
        d -= tl.sum(g, 1, keep_dims=True) / N
    d *= rstd
    if DH is not None:
        d += tl.load(DH + row * DH_STRIDE + col, keep, 0.0).to(tl.float32)
    tl.store(OUT + row * N + col, d, keep)
    if DX is not None:
        d *= dropout_factors(
            seed, row * ((N + 3) // 4) + tl.arange(0, BLOCK // 4)[None, :], THRESHOLD, SCALE
        )
        tl.store(DX + row * N + col, d, keep)


def backward_few(dy, dh, h, mean, rstd, norm, needs, out, dx, warps=None):
    """Gradients of weight and bias. Grid: blocks of columns, if a gradient is wanted, and rows, if
    theirs is.
    """
    n = number(h.shape[-1])
    block, _, most, *_ = backward_config(n)
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = (
        as_rows(dy),
        as_rows(h),
        maybe_rows(dh),
    )
    dw, db = (
        torch.empty(n, dtype=h.dtype, device=h.device) if need else None for need in needs[1:]
    )
    blocks = (n + 63) // 64 if any(needs[1:]) else 0
    seed, chance = drawn(norm.dropout)
    if any(needs):
        launch(
            norm_backward_few_kernel, (blocks + (rows if needs[0] else 0),), dy, dh, h, norm.weight,
            mean, rstd, out,
            dx, dw, db, seed, rows, norm.offset or 0.0, DY_STRIDE=dy_stride, DH_STRIDE=dh_stride,
            H_STRIDE=h_stride,
            N=n, BLOCK=block, BLOCKS=blocks, COLS=64, ROWS=64, num_warps=warps or most, **chance,
        )  # fmt: skip
    return dw, db


# Bytes: dy and h once, and once more from L2 (and dh once), the result once (and dx), 2 or 4 a
# column for each of two.
@triton.jit
def norm_backward_few_kernel(
    DY, DH, H, W, MEAN, RSTD, OUT, DX, DW, DB, SEED, rows, offset, DY_STRIDE: tl.constexpr,
    DH_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < BLOCKS:
        column_sums(
            DY, H, MEAN, RSTD, DW, DB, tl.program_id(0), rows, DY_STRIDE, H_STRIDE, N, COLS, ROWS
        )
    elif OUT is not None:
        row = tl.program_id(0) - BLOCKS
        whole_row(
            DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, row, rows, offset, DY_STRIDE, DH_STRIDE,
            H_STRIDE, N, BLOCK,
            THRESHOLD, SCALE,
        )  # fmt: skip


@triton.jit
def column_sums(
    DY, H, MEAN, RSTD, DW, DB, block, rows, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr,
    N: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr,
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
    DY, DH, H, W, MEAN, RSTD, OUT, DX, SEED, row, rows, offset, DY_STRIDE: tl.constexpr,
    DH_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
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
    if DX is not None:
        seed = tl.load(SEED)
    gradient(g, u, rstd, row, keep, MEAN, DH, OUT, DX, seed, DH_STRIDE, N, BLOCK, THRESHOLD, SCALE)


def backward_long(dy, dh, h, mean, rstd, norm, needs, out, dx, config):
    """Two passes: the two means of every row, then the results, block of columns by block of
    columns.
    """
    n = number(h.shape[-1])
    cols, _, warps, programs, stages, _ = config or chosen(
        h, dh, norm, " by columns", Config(1024, 1, 4, 4, 4)
    )
    blocks = (n + cols - 1) // cols
    programs = max(1, multiprocessors(h.device) * programs // blocks)
    (dy, _, dy_stride), (h, rows, h_stride), (dh, _, dh_stride) = (
        as_rows(dy),
        as_rows(h),
        maybe_rows(dh),
    )
    if not dynamic(rows):
        programs = min(programs, rows)
    sums = partial_sums(h, needs, programs)
    means = torch.empty((2, rows), dtype=torch.float32, device=h.device) if needs[0] else None
    args, strides = (
        (h, norm.weight, mean, rstd, means),
        dict(DY_STRIDE=dy_stride, H_STRIDE=h_stride),
    )
    if needs[0]:
        launch(
            norm_backward_means_kernel, (rows,), dy, *args, rows, norm.offset or 0.0, N=n,
            **means_config(h, rows),
            **strides,
        )  # fmt: skip
    seed, chance = drawn(norm.dropout)
    launch(
        norm_backward_columns_kernel, (blocks, programs), dy, dh, *args, out, dx, seed, sums, rows,
        norm.offset or 0.0,
        DH_STRIDE=dh_stride, N=n, WEIGHT=needs[1], BIAS=needs[2], COLS=cols, STAGES=stages,
        num_warps=warps, **strides,
        **chance,
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
    DY, H, W, MEAN, RSTD, MEANS, rows, offset, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
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
    DY, DH, H, W, MEAN, RSTD, MEANS, OUT, DX, SEED, SUMS, rows, offset, DY_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    seed = 0
    if DX is not None:
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


def add_up_config(programs, n: int) -> dict:
    """Columns for 128 programs or so, 32 bytes at least; as many partial sums of them at once as
    registers hold.
    """
    cols = min(32, max(8, triton.next_power_of_2(n) // 128))
    rows = 64 if dynamic(programs) else max(16, min(8192 // cols, triton.next_power_of_2(programs)))
    return dict(COLS=cols, ROWS=rows, num_warps=min(8, max(4, rows * cols // 1024)))


def add_up(sums, dtype, weight: bool, bias: bool):
    """Partial sums of all programs to the gradients."""
    if sums is None:
        return None, None
    _, programs, n = sums.shape
    programs, n = number(programs), number(n)
    dw, db = (
        torch.empty(n, dtype=dtype, device=sums.device) if need else None for need in (weight, bias)
    )
    config = add_up_config(programs, n)
    launch(
        add_up_kernel,
        ((n + config["COLS"] - 1) // config["COLS"],),
        sums,
        dw,
        db,
        programs,
        N=n,
        **config,
    )
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
