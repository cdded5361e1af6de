"""The gradient that comes back into a hidden layer, for Hopper: some warps multiply, others apply
the derivative.

While eight warps multiply a tile of dy W (specialised_loop.py), four others take the tile before
from shared memory, a piece after the other. They ask for what the forward kept of a piece before
they finish the one in front of it, and for the first before the products are there.
"""

from __future__ import annotations

from fusion_backend.compat.gluon import gl, jit, mbarrier, reinterpret, thread_barrier
from fusion_backend.kernels.gemm.epilogue import slope
from fusion_backend.kernels.gemm.main_loop import corner
from fusion_backend.kernels.gemm.specialised_loop import (
    count_of_tiles,
    multiply_tiles,
    shared_memory,
)


# Operations: 2 m n k. Bytes: dy, W and PRE read, D and SUMS written.
@jit(do_not_specialize=["m"])
def specialised_gradient_kernel(
    DY, W, PRE, B, D, SUMS, m,
    N: gl.constexpr, K: gl.constexpr, X_ROW: gl.constexpr, W_STRIDE: gl.constexpr,
    BY_OUTPUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, FINISHERS: gl.constexpr,
    ROWS: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    x_tiles, w_tiles, factors, parts, products, loaded, multiplied, stored = shared_memory(
        DY.dtype.element_ty, 1, BY_OUTPUT, BM, BN, BK, STAGES, PART
    )
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (DY, W, None, x_tiles, w_tiles, factors, products, loaded, multiplied, stored, m, N,
                 K, X_ROW, W_STRIDE, 0, BY_OUTPUT, False, BM, BN, BK, GROUP, STAGES),
            ),
            (
                finish_gradients,
                (PRE, B, D, SUMS, parts, multiplied, stored, m, N, ACT, SCALE, BM, BN, GROUP, PART,
                 ROWS),
            ),
        ],
        [FINISHERS],
        [REGISTERS],
    )  # fmt: skip


@jit
def places(
    top, left, m, N: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr
):
    """Where the elements of a piece are in a matrix with N columns, and which of them there are."""
    row = top + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = left + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims(row.to(gl.int64) * N, 1) + gl.expand_dims(column, 0)
    return at, gl.expand_dims(row < m, 1) & gl.expand_dims(column < N, 0)


@jit
def kept_piece(
    PRE, B, top, left, m, N: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A piece of what the forward kept, and its bias."""
    at, inside = places(top, left, m, N, ROWS, PART, layout)
    bias = gl.zeros([PART], PRE.dtype.element_ty, gl.SliceLayout(0, layout))
    if B is not None:
        column = left + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
        bias = gl.load(B + column, column < N, 0.0)
    return gl.load(PRE + at, inside, 0.0), bias


@jit
def finish_gradients(
    PRE, B, D, SUMS, parts, multiplied, stored, m,
    N: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The warps that finish: from the rounded sums to what is stored."""
    KIND: gl.constexpr = D.dtype.element_ty
    DOWN: gl.constexpr = BM // ROWS
    PARTS: gl.constexpr = BN // PART
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // PART, PART // 8], [gl.num_warps(), 1], [1, 0]
    )
    pieces = reinterpret(parts, KIND, [PARTS * DOWN, ROWS, PART], parts.layout)
    turn = 0
    for tile in range(gl.program_id(0), count_of_tiles(m, N, BM, BN), gl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        coming = kept_piece(PRE, B, top, left, m, N, ROWS, PART, layout)
        mbarrier.wait(multiplied.index(0), turn)
        for part in range(PARTS):
            column = left + part * PART
            for i in gl.static_range(DOWN):
                pre, bias = coming
                if i + 1 < DOWN:
                    coming = kept_piece(
                        PRE, B, top + (i + 1) * ROWS, column, m, N, ROWS, PART, layout
                    )
                else:  # after the last part one of its pieces again, which nobody uses
                    right = gl.minimum(column + PART, left + BN - PART)
                    coming = kept_piece(PRE, B, top, right, m, N, ROWS, PART, layout)
                before = pre.to(gl.float32) + gl.expand_dims(bias.to(gl.float32), 0)
                d = pieces.index(part * DOWN + i).load(layout).to(gl.float32)
                if ACT == "relu" or ACT == "relu_squared":  # infinite products are masked, too
                    d = gl.where(before <= 0.0, 0.0, d * slope(before, ACT, KIND, False))
                else:
                    d *= slope(before, ACT, KIND, False)
                if SCALE != 1.0:
                    d *= SCALE
                if SUMS is not None:
                    if i == 0:
                        total = sums_of_threads(d, ROWS, PART)
                    else:
                        total += sums_of_threads(d, ROWS, PART)
                at, inside = places(top + i * ROWS, column, m, N, ROWS, PART, layout)
                gl.store(D + at, d.to(KIND), inside)
            if SUMS is not None:
                store_sums(SUMS, total, top // BM * gl.num_warps(), column, N, PART)
        thread_barrier()
        mbarrier.arrive(stored.index(0))
        turn = turn ^ 1


@jit
def sums_of_threads(d, ROWS: gl.constexpr, PART: gl.constexpr):
    """The sums of what each thread has of a column, `[warps, their rows of threads, PART]`."""
    LANES: gl.constexpr = 256 // PART
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 8], [1, 1, LANES, PART // 8], [1, WARPS, 1, 1], [3, 2, 1, 0]
    )
    split = gl.reshape(d, [ROWS // (WARPS * LANES), WARPS, LANES, PART])
    return gl.sum(gl.convert_layout(split, layout, assert_trivial=True), 0)


@jit
def store_sums(SUMS, total, row, left, N: gl.constexpr, PART: gl.constexpr):
    """A row for each warp: if they added theirs up, each would wait for all others."""
    values = gl.sum(total, 1)
    layout: gl.constexpr = values.type.layout
    row += gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(1, layout))
    column = left + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims(row.to(gl.int64) * N, 1) + gl.expand_dims(column, 0)
    gl.store(SUMS + at, values, gl.expand_dims(column < N, 0))
