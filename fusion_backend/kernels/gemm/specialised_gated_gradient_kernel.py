"""The gradients that come back into the hidden layer of a block with a gate, for Hopper: some warps
multiply, others apply the product rule.

While eight warps multiply a tile of dy W (specialised_loop.py), four others take the tile before
from shared memory, a piece after the other, as in specialised_gradient_kernel.py.
"""

from __future__ import annotations

from fusion_backend.compat.gluon import gl, jit, mbarrier, reinterpret, thread_barrier
from fusion_backend.kernels.gemm.epilogue import epilogue, slope
from fusion_backend.kernels.gemm.main_loop import corner
from fusion_backend.kernels.gemm.specialised_gradient_kernel import kept_piece, places
from fusion_backend.kernels.gemm.specialised_loop import (
    count_of_tiles,
    multiply_tiles,
    shared_memory,
)


# Operations: 2 m n k. Bytes: dy, W, GATE and UP read, D_GATE, D_UP and HIDDEN written.
@jit(do_not_specialize=["m"])
def specialised_gated_gradient_kernel(
    DY, W, GATE, UP, B, B2, D_GATE, D_UP, HIDDEN, m,
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
                finish_gated_gradients,
                (GATE, UP, B, B2, D_GATE, D_UP, HIDDEN, parts, multiplied, stored, m, N, ACT,
                 SCALE, BM, BN, GROUP, PART, ROWS),
            ),
        ],
        [FINISHERS],
        [REGISTERS],
    )  # fmt: skip


@jit
def finish_gated_gradients(
    GATE, UP, B, B2, D_GATE, D_UP, HIDDEN, parts, multiplied, stored, m,
    N: gl.constexpr, ACT: gl.constexpr, SCALE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The warps that finish: from the rounded sums to what is stored."""
    KIND: gl.constexpr = D_GATE.dtype.element_ty
    DOWN: gl.constexpr = BM // ROWS
    PARTS: gl.constexpr = BN // PART
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // PART, PART // 8], [gl.num_warps(), 1], [1, 0]
    )
    pieces = reinterpret(parts, KIND, [PARTS * DOWN, ROWS, PART], parts.layout)
    turn = 0
    for tile in range(gl.program_id(0), count_of_tiles(m, N, BM, BN), gl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        gates = kept_piece(GATE, B, top, left, m, N, ROWS, PART, layout)
        ups = kept_piece(UP, B2, top, left, m, N, ROWS, PART, layout)
        mbarrier.wait(multiplied.index(0), turn)
        for piece in range(PARTS * DOWN):
            gate, up = with_bias_of(gates), with_bias_of(ups)
            # after the last piece the same one again, unused
            coming = gl.minimum(piece + 1, PARTS * DOWN - 1)
            below, right = top + coming % DOWN * ROWS, left + coming // DOWN * PART
            gates = kept_piece(GATE, B, below, right, m, N, ROWS, PART, layout)
            ups = kept_piece(UP, B2, below, right, m, N, ROWS, PART, layout)
            dh = pieces.index(piece).load(layout).to(gl.float32)
            active = epilogue(gate, ACT, KIND, False)
            d_gate = dh * up
            if SCALE != 1.0:
                active, d_gate = active * SCALE, d_gate * SCALE
            if ACT == "relu":  # infinite products are masked, too
                d_gate = gl.where(gate <= 0.0, 0.0, d_gate)
            else:
                d_gate *= slope(gate, ACT, KIND, False)
            column = left + piece // DOWN * PART
            at, inside = places(top + piece % DOWN * ROWS, column, m, N, ROWS, PART, layout)
            gl.store(D_GATE + at, d_gate.to(KIND), inside)
            gl.store(D_UP + at, (dh * active).to(KIND), inside)
            if HIDDEN is not None:
                gl.store(HIDDEN + at, (active * up).to(KIND), inside)
        thread_barrier()
        mbarrier.arrive(stored.index(0))
        turn = turn ^ 1


@jit
def with_bias_of(kept):
    """x W + b of a piece, in fp32."""
    product, bias = kept
    return product.to(gl.float32) + gl.expand_dims(bias.to(gl.float32), 0)
