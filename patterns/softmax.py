"""Softmax over the last dimension: softmax(x · scale + mask), or with `fill` where `drop` is set.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; scale, the additive mask, and the
boolean `drop` with its number `fill` may be missing. Masks broadcast. Computed in fp32; a row of
-inf alone is NaN, as in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch
from fusion_backend.kernels.common.cooperative_rows import (
    LANES,
    exchange,
    groups_of,
    hear,
    shareable,
    tell,
    turn,
)
from fusion_backend.kernels.common.inputs import as_rows, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.rows import (
    FEW,
    MAX_HELD,
    RESULTS,
    UNMEASURED,
    Broadcast,
    Config,
    grid,
    reject_broadcast,
    reject_rows,
    row_config,
    tuned,
)

# elements of the longest row that a program of its own is the fastest for, but for twice as many
HELD = 8192
SHARED = Config(2048, 1, 2, 16, 3)


@Pattern(reciprocal=True, inductor="recomputed")
def softmax(
    x: Tensor, scale: float | None, mask: Tensor | None, drop: Tensor | None, fill: float | None
) -> Tensor:
    if (drop is None) != (fill is None) or (mask is not None and drop is not None):
        raise ValueError("one mask at most; drop and fill belong together")
    x = x if scale is None else x * scale
    x = x if mask is None else x + mask
    x = x if drop is None else x.masked_fill(drop, fill)
    return torch.softmax(x, -1)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """another dimension"""
    return torch.softmax(x, 0)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """the logarithm of it"""
    return torch.log_softmax(x, -1)


@softmax.guard
def _(x, scale, mask, drop, fill):
    other = drop if mask is None else mask
    return (
        reject_dtypes(x=x, mask=mask)
        or reject_rows(x)
        or reject_broadcast(x, "mask" if drop is None else "drop", other)
        or reject_dynamic(scale=scale, fill=fill)
    )


@softmax.worthwhile
def _(x, scale, mask, drop, fill, training):
    n, masked = number(x.shape[-1]), mask is not None or drop is not None
    if n * x.element_size() > MAX_HELD and (masked or not shareable(x, SHARED)):
        return Reject(
            "rows of more than 64 KB are read twice: 131072 in fp32 timed at 0.90 of Inductor on an H200"
        )
    if n < 512 or (masked and statically_known_true(x.numel() < 1 << 26)):
        return UNMEASURED
    many = statically_known_true(x.numel() // n >= FEW)
    if training and many and statically_known_true(x.numel() < 1 << 24):
        return Reject(
            f"Inductor's training step is as fast for small tensors of {FEW} rows and more ({RESULTS})"
        )


@softmax.kernel
def _(x, scale, mask, drop, fill):
    n, rule = number(x.shape[-1]), row_config(number(x.shape[-1]), x.element_size())
    plain = mask is None and drop is None
    if plain and n > HELD and n != 2 * HELD and shareable(x, SHARED):
        return forward_shared(x, scale, SHARED)
    chosen = tuned("softmax", x.numel() // n, n, x.element_size(), rule) if plain else rule
    return forward(x, scale, mask, drop, fill, *chosen[:5])


def forward_shared(x, scale, config):
    """Of rows that are shared by programs, without a mask. Grid: groups of a program a piece."""
    n, y = number(x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cols, _, warps, programs, stages, _ = config
    pieces = triton.cdiv(n, cols)
    x, rows, stride = as_rows(x)
    launch(
        softmax_shared_kernel, (groups_of(rows, pieces, programs, x.device) * pieces,), x, y,
        exchange(rows, pieces, x.device), rows, 1.0 if scale is None else scale, STRIDE=stride, N=n,
        COLS=cols,
        PIECES=pieces, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return y


def forward(x, scale, mask, drop, fill, block, rows_each, warps, programs=0, stages=0):
    """Grid: rows / rows_each. With `programs`, so many a multiprocessor walk through the rows, the
    next on its way.
    """
    n, y = number(x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = Broadcast(x, drop if mask is None else mask)
    x, rows, stride = as_rows(x)
    held = dict(ROWS=rows_each, STAGES=stages)
    kernel, rest = (softmax_kernel, held) if block >= n else (softmax_long_kernel, {})
    launch(
        kernel, (grid(rows, rows_each, programs, x.device),), x, other.tensor, y, rows,
        *other.sizes, *other.strides,
        1.0 if scale is None else scale, 0.0 if fill is None else fill, STRIDE=stride, N=n,
        DROP=drop is not None,
        BLOCK=block, num_warps=warps, **rest,
    )  # fmt: skip
    return y


@softmax.backward(result=True)
def _(saved, dy):
    needs = saved.needs["x"], saved.mask is not None and saved.needs["mask"]
    dx, ds = backward(dy, saved.result, saved.x, saved.scale, saved.drop, needs)
    return dx, ds.sum_to_size(saved.mask.shape) if needs[1] else None, None


def backward(dy, y, x, scale, drop, needs, config=None):
    """ds = y (dy - sum(y dy)) is the gradient of what is exponentiated; dx is ds · scale, 0 where
    dropped.
    """
    n, other = number(x.shape[-1]), Broadcast(x, drop)
    dx, ds = (
        torch.empty(y.shape, dtype=y.dtype, device=y.device) if need else None for need in needs
    )
    (dy, _, dy_stride), (y, rows, y_stride) = as_rows(dy), as_rows(y)
    rule = row_config(n, 2 * y.element_size())
    block, rows_each, warps, *_ = config or tuned(
        "softmax backward", rows, n, y.element_size(), rule
    )
    kernel, rest = (
        (softmax_backward_kernel, dict(ROWS=rows_each))
        if block >= n
        else (softmax_backward_long_kernel, {})
    )
    launch(
        kernel, ((rows + rows_each - 1) // rows_each,), dy, y, other.tensor, dx, ds, rows,
        *other.sizes, *other.strides,
        1.0 if scale is None else scale, DY_STRIDE=dy_stride, Y_STRIDE=y_stride, N=n, BLOCK=block,
        num_warps=warps,
        **rest,
    )  # fmt: skip
    return dx, ds


@triton.jit
def masked(x, MASK, row, col, keep, heads, length, m0, m1, m2, m3, fill, DROP: tl.constexpr):
    """x with its mask, which is read where it broadcasts from."""
    at = row // length // heads * m0 + row // length % heads * m1 + row % length * m2 + col * m3
    m = tl.load(MASK + at, keep, 0)
    if DROP:
        return tl.where(m != 0, tl.cast(fill, tl.float32), x)
    else:
        return x + m.to(tl.float32)


# Bytes: x once, y once, and the mask.
@triton.jit
def softmax_kernel(
    X, MASK, Y, rows, heads, length, m0, m1, m2, m3, scale, fill, STRIDE: tl.constexpr,
    N: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    top, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    col = tl.arange(0, BLOCK)[None, :]
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(rows - top, step), num_stages=STAGES):
        row = (top + i * step + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & (col < N)
        x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32) * tl.cast(scale, tl.float32)
        if MASK is not None:
            x = masked(x, MASK, row, col, keep, heads, length, m0, m1, m2, m3, fill, DROP)
        x = tl.where(col < N, x, float("-inf"))
        e = tl.exp2((x - tl.max(x, 1, keep_dims=True)) * 1.4426950408889634)
        tl.store(Y + row * N + col, e * (1.0 / tl.sum(e, 1, keep_dims=True)), keep)


# Bytes: as above; the second reading of a row comes from L2.
@triton.jit
def softmax_long_kernel(
    X, MASK, Y, rows, heads, length, m0, m1, m2, m3, scale, fill, STRIDE: tl.constexpr,
    N: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # the largest value of each lane, and its sum of e^(x - top)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32) * tl.cast(
            scale, tl.float32
        )
        if MASK is not None:
            x = masked(x, MASK, row, start + lane, keep, heads, length, m0, m1, m2, m3, fill, DROP)
        x = tl.where(keep, x, float("-inf"))
        top = tl.maximum(tops, x)
        shift = tl.where(top == float("-inf"), 0.0, top)
        sums = sums * tl.exp2((tops - shift) * 1.4426950408889634) + tl.exp2(
            (x - shift) * 1.4426950408889634
        )
        tops = top
    top = tl.max(tops)
    sums *= tl.exp2((tops - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634)
    inverse = 1.0 / tl.sum(sums)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32) * tl.cast(
            scale, tl.float32
        )
        if MASK is not None:
            x = masked(x, MASK, row, start + lane, keep, heads, length, m0, m1, m2, m3, fill, DROP)
        tl.store(
            Y + row * N + start + lane, tl.exp2((x - top) * 1.4426950408889634) * inverse, keep
        )


# Bytes: x once, y once, 8 a row and piece.
@triton.jit
def softmax_shared_kernel(
    X, Y, WORDS, rows, scale, STRIDE: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    started = turn(WORDS, rows, PIECES)
    group, groups, piece = started // PIECES, tl.num_programs(0) // PIECES, started % PIECES
    col = piece * COLS + tl.arange(0, COLS)
    for i in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        x = tl.load(X + row * STRIDE + col, col < N, 0.0).to(tl.float32) * tl.cast(
            scale, tl.float32
        )
        x = tl.where(col < N, x, float("-inf"))
        top = tl.max(x)
        e = tl.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634)
        before = tell(WORDS + row * PIECES + piece, top, tl.sum(e))
        tops, sums = hear(WORDS + row * PIECES, before, PIECES)
        tops = tl.where(tl.arange(0, LANES) < PIECES, tops, float("-inf"))
        most = tl.max(tops)
        total = tl.sum(sums * tl.exp2((tops - most) * 1.4426950408889634))
        tl.store(
            Y + row * N + col, e * (tl.exp2((top - most) * 1.4426950408889634) / total), col < N
        )


# Bytes: dy and y once, dx once.
@triton.jit
def softmax_backward_kernel(
    DY, Y, DROPPED, DX, DS, rows, heads, length, m0, m1, m2, m3, scale, DY_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    dy = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
    y = tl.load(Y + row * Y_STRIDE + col, keep, 0.0).to(tl.float32)
    ds = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
    if DS is not None:
        tl.store(DS + row * N + col, ds, keep)
    if DX is not None:
        if DROPPED is not None:
            ds = masked(ds, DROPPED, row, col, keep, heads, length, m0, m1, m2, m3, 0.0, True)
        tl.store(DX + row * N + col, ds * tl.cast(scale, tl.float32), keep)


# Bytes: as above; the second readings come from L2.
@triton.jit
def softmax_backward_long_kernel(
    DY, Y, DROPPED, DX, DS, rows, heads, length, m0, m1, m2, m3, scale, DY_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        dy = tl.load(DY + row * DY_STRIDE + start + lane, keep, 0.0).to(tl.float32)
        sums += tl.load(Y + row * Y_STRIDE + start + lane, keep, 0.0).to(tl.float32) * dy
    total = tl.sum(sums)
    for start in tl.range(0, N, BLOCK):
        col = start + lane
        dy = tl.load(DY + row * DY_STRIDE + col, col < N, 0.0).to(tl.float32)
        ds = tl.load(Y + row * Y_STRIDE + col, col < N, 0.0).to(tl.float32) * (dy - total)
        if DS is not None:
            tl.store(DS + row * N + col, ds, col < N)
        if DX is not None:
            if DROPPED is not None:
                ds = masked(
                    ds, DROPPED, row, col, col < N, heads, length, m0, m1, m2, m3, 0.0, True
                )
            tl.store(DX + row * N + col, ds * tl.cast(scale, tl.float32), col < N)


@softmax.inputs(dict(rows=7, n=100), dict(rows=65536, n=2048))
def _(tensor, rows, n):
    return tensor(rows, n), 0.125, tensor(rows, n), tensor(rows, n) > 1, -1e4
