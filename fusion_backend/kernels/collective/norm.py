"""The sum over ranks, the residual sum and the norm of rows, in one kernel.

h = x_0 + x_1 + ... + residual, where x_i is the x of rank i; c = h - mean(h), or h where `centred`
is false; rstd = 1 / sqrt(mean(c²) + eps); y = c · rstd · (weight + offset) + bias. Sums are in fp32
and in the order of the ranks, so that all ranks compute the same bits.

Each rank puts its rows into memory that the others read (workspace.py). *One shot*: it then reads
the rows of all ranks, and computes everything. *Two shots*: it sums up its share of the rows alone,
writes h into the memory of all ranks, and then normalises all rows; h is rounded before it is
normalised. One shot reads world - 1 times the size of x over the links between the GPUs, two shots
move twice (world - 1) / world of it in each direction, and wait twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.collective.workspace import (
    DATA,
    FLAGS,
    PROGRAMS,
    Workspace,
    workspace_of,
)
from fusion_backend.kernels.common.inputs import as_rows, maybe_rows
from fusion_backend.kernels.common.launch import TRIAL, directly, launch
from fusion_backend.kernels.norm.operands import Norm

MAX_ROW = 16384  # elements, which stay in the registers of one program


@triton.jit
def part_of(POINTERS, rank, half, TYPE: tl.constexpr):
    """Where the rows of a rank begin, as a pointer to elements of this type."""
    address = tl.load(POINTERS + rank) + half
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def meet(POINTERS, program, count, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Wait until the same program of every rank has come to this count. What any of them has
    written before can then be read.

    Counts only grow, so that no flag is ever reset, and a rank that is ahead by a launch does no
    harm. `count - seen` is right also where the counts have passed 2³¹.
    """
    tl.debug_barrier()
    peer = tl.arange(0, WORLD)
    counts = tl.zeros([WORLD], tl.int32) + count
    flags = tl.load(POINTERS + peer) + FLAGS + (program * WORLD + RANK) * 4
    tl.atomic_xchg(flags.to(tl.pointer_type(tl.int32)), counts, sem="release", scope="sys")
    flags = tl.load(POINTERS + RANK) + FLAGS + (program * WORLD + peer) * 4
    flags = flags.to(tl.pointer_type(tl.int32))
    zeros = tl.zeros([WORLD], tl.int32)
    seen = tl.atomic_add(flags, zeros, sem="acquire", scope="sys")
    behind = tl.max(counts - seen, 0)
    while behind > 0:
        seen = tl.atomic_add(flags, zeros, sem="acquire", scope="sys")
        behind = tl.max(counts - seen, 0)
    tl.debug_barrier()


@triton.jit
def summed(
    POINTERS, half, offsets, keep, R, residual_offsets, TYPE: tl.constexpr, WORLD: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The rows of all ranks and the residual, in fp32."""
    first = part_of(POINTERS, 0, half, TYPE)
    h = tl.load(first + offsets, keep, 0.0, cache_modifier=".cg").to(tl.float32)
    if ALIGNED:
        for rank in tl.static_range(1, WORLD):
            rows = part_of(POINTERS, rank, half, TYPE)
            h += tl.load(rows + offsets, keep, 0.0, cache_modifier=".cg").to(tl.float32)
    else:  # element by element, the addresses of all ranks at once need too many registers
        for rank in range(1, WORLD):
            rows = part_of(POINTERS, rank, half, TYPE)
            h += tl.load(rows + offsets, keep, 0.0, cache_modifier=".cg").to(tl.float32)
    if R is not None:
        h += tl.load(R + residual_offsets, keep, 0.0).to(tl.float32)
    return h


@triton.jit
def normalise(
    h, row, col, keep, W, B, Y, H, MEAN, RSTD, offset, eps,
    N: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Store h and its norm."""
    tl.store(H + row * N + col, h, keep)
    if CENTRED:
        mean = tl.sum(h, 0) / N
        h = tl.where(col < N, h - mean, 0.0)
        if MEAN is not None:
            tl.store(MEAN + row, mean)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / N + tl.cast(eps, tl.float32))
    y = h * rstd
    if W is not None:
        y *= tl.load(W + col, col < N, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    if B is not None:
        y += tl.load(B + col, col < N, 0.0).to(tl.float32)
    tl.store(Y + row * N + col, y, keep)
    if RSTD is not None:
        tl.store(RSTD + row, rstd)


# Bytes: x, and the rows of all ranks, of which world - 1 times x come from other GPUs; residual, y
# and h once. ROUNDS counts the steps of a program: two for each launch, whether it takes both. All
# programs are started by every launch, so that they count alike. The half of the memory that a
# launch writes is that of the launch before the last: whoever reads it now has not begun the last.
@triton.jit
def one_shot_norm_kernel(
    X, R, W, B, Y, H, MEAN, RSTD, POINTERS, ROUNDS, rows, capacity, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = tl.load(ROUNDS + program)
    half = DATA + ((count >> 1) & 1).to(tl.int64) * capacity
    col = tl.arange(0, BLOCK)
    keep = col < N
    mine = part_of(POINTERS, RANK, half, X.dtype.element_ty)
    for i in range(program, rows, programs):
        row = tl.cast(i, tl.int64)
        tl.store(mine + row * N + col, tl.load(X + row * STRIDE + col, keep, 0.0), keep)
    if program < rows:
        meet(POINTERS, program, count + 2, RANK, WORLD)
        for i in range(program, rows, programs):
            row = tl.cast(i, tl.int64)
            h = summed(
                POINTERS, half, row * N + col, keep, R, row * RESIDUAL_STRIDE + col,
                X.dtype.element_ty, WORLD, N % 8 == 0,
            )  # fmt: skip
            normalise(h, row, col, keep, W, B, Y, H, MEAN, RSTD, offset, eps, N, CENTRED)
    tl.debug_barrier()  # all threads have read the count
    tl.store(ROUNDS + program, count + 2)


# Bytes: x, the share of each rank, and h into all of them: twice (world - 1) / world of x over the
# links in each direction; h again from this rank's memory; y and h once. A row of a rank's memory
# is x until the rank that owns the row has read it, and then h: nobody else reads it in between.
@triton.jit
def two_shot_norm_kernel(
    X, R, W, B, Y, H, MEAN, RSTD, POINTERS, ROUNDS, rows, capacity, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = tl.load(ROUNDS + program)
    half = DATA + ((count >> 1) & 1).to(tl.int64) * capacity
    col = tl.arange(0, BLOCK)
    share = tl.cdiv(rows, WORLD)
    mine = part_of(POINTERS, RANK, half, X.dtype.element_ty)
    for owner in range(WORLD):
        for i in range(program, share, programs):
            row = tl.cast(owner * share + i, tl.int64)
            keep = (col < N) & (row < rows)
            tl.store(mine + row * N + col, tl.load(X + row * STRIDE + col, keep, 0.0), keep)
    if program < share:
        meet(POINTERS, program, count + 1, RANK, WORLD)
        for i in range(program, share, programs):
            row = tl.cast(RANK * share + i, tl.int64)
            keep = (col < N) & (row < rows)
            h = summed(
                POINTERS, half, row * N + col, keep, R, row * RESIDUAL_STRIDE + col,
                X.dtype.element_ty, WORLD, N % 8 == 0,
            )  # fmt: skip
            for rank in tl.static_range(WORLD):
                tl.store(part_of(POINTERS, rank, half, X.dtype.element_ty) + row * N + col, h, keep)
        meet(POINTERS, program, count + 2, RANK, WORLD)
        for owner in range(WORLD):
            for i in range(program, share, programs):
                row = tl.cast(owner * share + i, tl.int64)
                if row < rows:
                    keep = col < N
                    h = tl.load(mine + row * N + col, keep, 0.0, cache_modifier=".cg")
                    normalise(
                        h.to(tl.float32), row, col, keep, W, B, Y, H, MEAN, RSTD, offset, eps, N,
                        CENTRED,
                    )  # fmt: skip
    tl.debug_barrier()  # all threads have read the count
    tl.store(ROUNDS + program, count + 2)


def fresh(x: Tensor, norm: Norm, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and h like x and contiguous, mean and rstd `[rows]` in fp32: empty unless saved, mean also
    where the norm is not centred.
    """
    rows = x.numel() // x.shape[-1]
    y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    mean, rstd = (
        torch.empty(rows if keep else 0, dtype=torch.float32, device=x.device)
        for keep in (save and norm.centred, save)
    )
    return y, h, mean, rstd


def all_reduce_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, save: bool, group: str, two_shot: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h, mean and rstd as `fresh` makes them. A collective call: every rank of the group makes
    it, in the same order, with the same shapes, dtype and `two_shot`.

    x and residual are `[..., n]` of one shape and dtype, fp32, bf16 or fp16, with n up to MAX_ROW;
    weight and bias `[n]` or None. Grid: PROGRAMS, of which each takes every PROGRAMS-th row, of all
    rows or of each share.
    """
    filled = fresh(x, norm, save)
    place = workspace_of(group, x.numel() * x.element_size(), x.device)
    start(x, residual, norm, filled, place, two_shot)
    return filled


def start(
    x: Tensor, residual: Tensor | None, norm: Norm, filled: tuple[Tensor, ...], place: Workspace,
    two_shot: bool,
) -> None:  # fmt: skip
    """Launch the kernel that fills what `fresh` has made."""
    kernel = two_shot_norm_kernel if two_shot else one_shot_norm_kernel
    n = x.shape[-1]
    (x, rows, stride), (residual, _, residual_stride) = as_rows(x), maybe_rows(residual)
    y, h, mean, rstd = filled
    saved = [t if t.numel() else None for t in (mean, rstd)]
    block = max(4, triton.next_power_of_2(n))
    run = launch if TRIAL.get() is not None else directly
    run(
        kernel, (PROGRAMS,), x, residual, norm.weight, norm.bias, y, h, *saved,
        place.pointers, place.rounds, rows, place.capacity, norm.offset or 0.0, norm.eps,
        STRIDE=stride, RESIDUAL_STRIDE=residual_stride, N=n, CENTRED=norm.centred, BLOCK=block,
        RANK=place.rank, WORLD=place.world, num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
