"""The gradients of weight and bias of a normalisation: sums over its rows.

A program adds up the rows that it has, and writes its partial sums; another kernel adds those up,
in order, so that the bits are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.kernels.common.launch import launch


def partial_sums(h: Tensor, needs: tuple[bool, bool, bool], programs) -> Tensor | None:
    """Memory for the partial sums, `[wanted of weight and bias, programs, n]` in fp32; None where
    neither is wanted.
    """
    count = sum(needs[1:])
    if not count:
        return None
    return torch.empty((count, programs, h.shape[-1]), dtype=torch.float32, device=h.device)


@triton.jit
def write_sums(
    SUMS, dw, db, group, groups, col, keep,
    N: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The partial sums of one of all groups of rows."""
    at = group * N + col
    if WEIGHT:
        tl.store(SUMS + at, dw, keep)
        at += groups * N
    if BIAS:
        tl.store(SUMS + at, db, keep)


def add_up_config(programs, n: int) -> dict:
    """Columns for 128 programs or so, 32 bytes at least; as many partial sums of them at once as
    registers hold.
    """
    cols = min(32, max(8, triton.next_power_of_2(n) // 128))
    rows = 64 if dynamic(programs) else max(16, min(8192 // cols, triton.next_power_of_2(programs)))
    return dict(COLS=cols, ROWS=rows, num_warps=min(8, max(4, rows * cols // 1024)))


def add_up(
    sums: Tensor | None, dtype: torch.dtype, weight: bool, bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias `[n]` in dtype, from the partial sums of all programs; None
    for what is not wanted. Grid: blocks of columns.
    """
    if sums is None:
        return None, None
    _, programs, n = sums.shape
    programs, n = number(programs), number(n)
    dw, db = (
        torch.empty(n, dtype=dtype, device=sums.device) if need else None for need in (weight, bias)
    )
    config = add_up_config(programs, n)
    blocks = (n + config["COLS"] - 1) // config["COLS"]
    launch(add_up_kernel, (blocks,), sums, dw, db, programs, N=n, **config)
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
