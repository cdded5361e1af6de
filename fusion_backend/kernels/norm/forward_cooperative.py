"""Forward of row normalisations for rows that are too long for a program to hold while it reads the
next.

Programs share a row (common/cooperative_rows.py): each finds the moments of its piece, and merges
those of all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.cooperative_rows import (
    EMPTY,
    LANES,
    groups_of,
    mailbox,
    publish,
    receive,
    shareable,
    ticket,
)
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import MAX_HELD, Config
from fusion_backend.kernels.norm.operands import Forward
from fusion_backend.kernels.norm.pieces import read_h


def config_for(simple: bool) -> Config:
    """32 elements a thread, and as many programs as registers, or shared memory for x and the
    residual, leave room for (`benchmarks.compile_kernels` prints them).
    """
    return Config(2048, 1, 2, 14 if simple else 12, 3)


def worthwhile(x: Tensor, dropout: Dropout | None) -> bool:
    """For rows beyond 64 KB, or beyond 16 KB where a random number an element would keep a program
    from reading.
    """
    n = number(x.shape[-1])
    longest = MAX_HELD if dropout is None else MAX_HELD // 4
    return n * x.element_size() > longest and shareable(x, config_for(False))


def forward(operands: Forward, config: Config | None = None, **constants) -> None:
    """Fills what operands.Forward says; constants are those that all forward kernels take.

    Grid: groups of programs, a program for each piece of config.block columns.
    """
    simple = operands.residual is None and operands.seed is None
    config = config or config_for(simple)
    *tensors, rows, offset, eps = operands
    pieces, device = triton.cdiv(constants["N"], config.block), operands.x.device
    launch(
        norm_shared_kernel, (groups_of(rows, pieces, config.programs, device) * pieces,),
        *tensors, mailbox(rows, pieces, device), rows, offset, eps, BLOCK=config.block,
        PIECES=pieces, STAGES=config.stages, num_warps=config.warps, **constants,
    )  # fmt: skip


# Bytes: x once (and residual), y once (and h), 4 or 8 a row where saved, 8 a row and piece; weight
# and bias from L1.
@triton.jit
def norm_shared_kernel(
    X, SEED, R, W, B, Y, H, MEAN, RSTD, MAILBOX, rows, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    started = ticket(MAILBOX, rows, PIECES)
    group, groups, piece = started // PIECES, tl.num_programs(0) // PIECES, started % PIECES
    col = piece * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    counts = tl.where(lane < PIECES, tl.minimum(N - lane * BLOCK, BLOCK), 0)
    for i in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        h = read_h(X, SEED, R, row, piece, STRIDE, RESIDUAL_STRIDE, N, BLOCK, THRESHOLD, SCALE)
        if H is not None:
            tl.store(H + row * N + col, h, col < N)
        own = 0.0
        if CENTRED:
            own = tl.sum(h) / tl.minimum(N - piece * BLOCK, BLOCK)
        c = tl.where(col < N, h - own, 0.0)
        before = publish(MAILBOX + row * PIECES + piece, tl.sum(c * c), own)
        squares, means = receive(MAILBOX + row * PIECES, before, PIECES)
        mean = 0.0
        if CENTRED:
            mean = tl.sum(means * counts) / N
            squares += counts * (means - mean) * (means - mean)
        rstd = tl.rsqrt(tl.sum(squares) / N + tl.cast(eps, tl.float32))
        y = (h - mean) * rstd
        # always; what stands in a branch is not read ahead: only x and the residual are
        if before == EMPTY:
            if W is not None:
                y *= tl.load(W + col, col < N, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
            if B is not None:
                y += tl.load(B + col, col < N, 0.0).to(tl.float32)
        tl.store(Y + row * N + col, y, col < N)
        if piece == 0:
            if MEAN is not None:
                tl.store(MEAN + row, mean)
            if RSTD is not None:
                tl.store(RSTD + row, rstd)
