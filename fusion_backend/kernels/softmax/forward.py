"""Forward of softmax over rows: softmax(x · scale + mask), or with `fill` where `drop` is set.

Three kernels: of rows that one program holds in registers, of longer rows that it reads twice, and
of long rows without a mask that several programs share (common/cooperative_rows.py). All compute in
fp32; a row of -inf alone is NaN, as in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.cooperative_rows import (
    LANES,
    groups_of,
    mailbox,
    publish,
    receive,
    shareable,
    ticket,
)
from fusion_backend.kernels.common.inputs import as_rows, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import Broadcast, Config, grid, row_config, tuned

# elements of the longest row that a program of its own is the fastest for, but for twice as many
HELD = 8192
COOPERATIVE = Config(2048, 1, 2, 16, 3)


def forward(
    x: Tensor, scale: float | None, mask: Tensor | None, drop: Tensor | None, fill: float | None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The softmax of each row of x `[..., n]`, contiguous, in x's dtype (fp32, bf16, fp16).

    The columns of x are one element apart. At most one of mask (of x's dtype) and drop (bool) is
    given; it broadcasts to x, of at most four dimensions, and is read where it lies. Without a
    config the one that was measured to be the fastest. Grid: rows / config.rows; with
    config.programs, so many a multiprocessor walk through the rows, the next on its way.
    """
    n = number(x.shape[-1])
    plain = mask is None and drop is None
    if config is None:
        rule = row_config(n, x.element_size())
        if plain and n > HELD and n != 2 * HELD and shareable(x, COOPERATIVE):
            return forward_cooperative(x, scale, COOPERATIVE)
        rows = x.numel() // n
        config = tuned("softmax", rows, n, x.element_size(), rule) if plain else Config(*rule)
    y, shape = flat(x.shape, x.dtype, x.device), x.shape
    other = Broadcast(x, drop if mask is None else mask)
    x, rows, stride = as_rows(x)
    held = dict(ROWS=config.rows, STAGES=config.stages)
    kernel, rest = (softmax_kernel, held) if config.block >= n else (softmax_long_kernel, {})
    launch(
        kernel, (grid(rows, config.rows, config.programs, x.device),),
        x, other.tensor, y, rows, *other.sizes, *other.strides,
        1.0 if scale is None else scale, 0.0 if fill is None else fill,
        STRIDE=stride, N=n, DROP=drop is not None, BLOCK=config.block, num_warps=config.warps,
        **rest,
    )  # fmt: skip
    return shaped(y, shape)


def forward_cooperative(x: Tensor, scale: float | None, config: Config) -> Tensor:
    """The softmax of rows that programs share, without a mask; x as above, of 16 bits.

    Grid: groups of programs, a program for each piece of config.block columns.
    """
    n, y, shape = number(x.shape[-1]), flat(x.shape, x.dtype, x.device), x.shape
    pieces = triton.cdiv(n, config.block)
    x, rows, stride = as_rows(x)
    launch(
        softmax_shared_kernel, (groups_of(rows, pieces, config.programs, x.device) * pieces,),
        x, y, mailbox(rows, pieces, x.device), rows, 1.0 if scale is None else scale,
        STRIDE=stride, N=n, COLS=config.block, PIECES=pieces, STAGES=config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return shaped(y, shape)


@triton.jit
def with_mask(x, MASK, row, col, keep, sizes, strides, fill, DROP: tl.constexpr):
    """x with its mask, which is read where it broadcasts from: `[batch, head, length, n]` has
    `sizes` heads and rows of a head.
    """
    heads, length = sizes
    mask_batch, mask_head, mask_row, mask_col = strides
    at = (
        row // length // heads * mask_batch
        + row // length % heads * mask_head
        + row % length * mask_row
        + col * mask_col
    )
    m = tl.load(MASK + at, keep, 0)
    if DROP:
        return tl.where(m != 0, tl.cast(fill, tl.float32), x)
    else:
        return x + m.to(tl.float32)


# Bytes: x once, y once, and the mask.
@triton.jit
def softmax_kernel(
    X, MASK, Y, rows, heads, length, mask_batch, mask_head, mask_row, mask_col, scale, fill,
    STRIDE: tl.constexpr, N: tl.constexpr, DROP: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sizes, strides = (heads, length), (mask_batch, mask_head, mask_row, mask_col)
    top, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    col = tl.arange(0, BLOCK)[None, :]
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(rows - top, step), num_stages=STAGES):
        row = (top + i * step + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & (col < N)
        x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32) * tl.cast(scale, tl.float32)
        if MASK is not None:
            x = with_mask(x, MASK, row, col, keep, sizes, strides, fill, DROP)
        x = tl.where(col < N, x, float("-inf"))
        e = tl.exp2((x - tl.max(x, 1, keep_dims=True)) * 1.4426950408889634)
        tl.store(Y + row * N + col, e * (1.0 / tl.sum(e, 1, keep_dims=True)), keep)


# Bytes: as above; the second reading of a row comes from L2.
@triton.jit
def softmax_long_kernel(
    X, MASK, Y, rows, heads, length, mask_batch, mask_head, mask_row, mask_col, scale, fill,
    STRIDE: tl.constexpr, N: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sizes, strides = (heads, length), (mask_batch, mask_head, mask_row, mask_col)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # the largest value of each lane, and its sum of e^(x - top)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        x *= tl.cast(scale, tl.float32)
        if MASK is not None:
            x = with_mask(x, MASK, row, start + lane, keep, sizes, strides, fill, DROP)
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
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        x *= tl.cast(scale, tl.float32)
        if MASK is not None:
            x = with_mask(x, MASK, row, start + lane, keep, sizes, strides, fill, DROP)
        at = Y + row * N + start + lane
        tl.store(at, tl.exp2((x - top) * 1.4426950408889634) * inverse, keep)


# Bytes: x once, y once, 8 a row and piece.
@triton.jit
def softmax_shared_kernel(
    X, Y, MAILBOX, rows, scale, STRIDE: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
    PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    started = ticket(MAILBOX, rows, PIECES)
    group, groups, piece = started // PIECES, tl.num_programs(0) // PIECES, started % PIECES
    col = piece * COLS + tl.arange(0, COLS)
    for i in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        x = tl.load(X + row * STRIDE + col, col < N, 0.0).to(tl.float32)
        x *= tl.cast(scale, tl.float32)
        x = tl.where(col < N, x, float("-inf"))
        top = tl.max(x)
        e = tl.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634)
        before = publish(MAILBOX + row * PIECES + piece, top, tl.sum(e))
        tops, sums = receive(MAILBOX + row * PIECES, before, PIECES)
        tops = tl.where(tl.arange(0, LANES) < PIECES, tops, float("-inf"))
        most = tl.max(tops)
        total = tl.sum(sums * tl.exp2((tops - most) * 1.4426950408889634))
        at = Y + row * N + col
        tl.store(at, e * (tl.exp2((top - most) * 1.4426950408889634) / total), col < N)
