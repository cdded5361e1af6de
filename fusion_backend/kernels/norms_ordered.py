"""Backward of the normalisations for many long rows in one kernel, so that the second reading of a row comes from L2.

Rows go in slabs that L2 holds. A program has either one row, whose two means it takes, or columns of a slab, whose
results it takes when the means of the slab are there. Programs take turns in the order in which they start, and wait
only for turns before their own, which wait for nobody: so none waits in vain, whatever else runs on the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusion_backend.kernels.dropout import dropout_factors
from fusion_backend.kernels.launch import launch

BLOCK = 256  # elements of a row that a warp has at once, 8 a thread


def slabs(rows: int, slab: int) -> int:
    return (rows + slab - 1) // slab


def run(dy, dh, h, weight, mean, rstd, means, out, dx, seed, sums, rows, offset, n, config, **constants):
    """Fills out, dx and sums `[weight and bias, slabs · parts, n]`. Grid: turns, one slab more than there are."""
    cols, slab, warps, parts, stages, *_ = config
    blocks, count = (n + cols - 1) // cols, slabs(rows, slab)
    turns = torch.zeros(count + 1, dtype=torch.int32, device=h.device)
    launch(
        norm_backward_ordered_kernel, ((count + 1) * (slab + blocks * parts),), dy, dh, h, weight, mean, rstd, means,
        turns, out, dx, seed, sums, rows, offset, N=n, COLS=cols, BLOCK=BLOCK * warps, SLAB=slab, BLOCKS=blocks,
        PARTS=parts, STAGES=stages, num_warps=warps, **constants,
    )  # fmt: skip


# Bytes: dy and h once, and once more from L2 (and dh once), the result once (and dx), 8 a part of a slab and column.
@triton.jit
def norm_backward_ordered_kernel(
    DY, DH, H, W, MEAN, RSTD, MEANS, TURNS, OUT, DX, SEED, SUMS, rows, offset, DY_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr, SLAB: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    turn = tl.atomic_add(TURNS, 1, sem="relaxed")
    slab, place = turn // (SLAB + BLOCKS * PARTS), turn % (SLAB + BLOCKS * PARTS)
    if place < SLAB:
        row = slab * SLAB + place
        if row < rows:
            row_means(DY, H, W, MEAN, RSTD, MEANS, row.to(tl.int64), rows, offset, DY_STRIDE, H_STRIDE, N, BLOCK)
            tl.debug_barrier()
            tl.atomic_add(TURNS + 1 + slab, 1, sem="release")
    elif slab > 0:  # columns of the slab before, whose rows all have their turns
        slab -= 1
        block, part = (place - SLAB) % BLOCKS, (place - SLAB) // BLOCKS
        end = tl.minimum(rows, (slab + 1) * SLAB)
        done = 0
        while done < end - slab * SLAB:
            done = tl.atomic_add(TURNS + 1 + slab, 0, sem="acquire")
        columns(
            DY, DH, H, W, MEAN, RSTD, MEANS, OUT, DX, SEED, SUMS, block, slab * SLAB + part, end, PARTS,
            slab * PARTS + part, tl.cdiv(rows, SLAB) * PARTS, rows, offset, DY_STRIDE, H_STRIDE, DH_STRIDE, N, WEIGHT,
            BIAS, COLS, STAGES, THRESHOLD, SCALE,
        )  # fmt: skip


@triton.jit
def row_means(
    DY, H, W, MEAN, RSTD, MEANS, row, rows, offset, DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores mean(g u) and, of a centred norm, mean(g)."""
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


@triton.jit
def columns(
    DY, DH, H, W, MEAN, RSTD, MEANS, OUT, DX, SEED, SUMS, block, top, end, step, part, parts, rows, offset,
    DY_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, DH_STRIDE: tl.constexpr, N: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Results of a block of columns and every step-th row from top to end, and their partial sums."""
    col = block * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    if DX is not None:
        seed = tl.load(SEED)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    for i in tl.range(top, end, step, num_stages=STAGES):
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
                quad = row * ((N + 3) // 4) + block * (COLS // 4) + tl.arange(0, COLS // 4)
                d *= dropout_factors(seed, quad, THRESHOLD, SCALE)
                tl.store(DX + row * N + col, d, inside)
    at = part * N + col
    if WEIGHT:
        tl.store(SUMS + at, dw, inside)
        at += parts * N
    if BIAS:
        tl.store(SUMS + at, db, inside)
