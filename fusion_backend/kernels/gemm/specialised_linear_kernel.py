"""A product with its epilogue for Hopper, in which some warps multiply and others finish.

While eight warps multiply a tile (specialised_loop.py), four others take the tile before from
shared memory, add the bias, apply the epilogue and store the result. In kernels/gemm/linear.py a
second program on the same multiprocessor does that, whose tiles have to be half as wide, so that
both read more. The kernel is written in Gluon, because Triton divides the work of a program among
its warps by itself.

Inductor, too, rounds a product before it adds the bias, if an elementwise operation follows. In
fp16 a product beyond 65504 is infinite then, whatever its bias.
"""

from __future__ import annotations

from fusion_backend.compat.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_tile,
    thread_barrier,
    tma,
)
from fusion_backend.kernels.common.dropout import random_words
from fusion_backend.kernels.gemm.epilogue import epilogue, mark
from fusion_backend.kernels.gemm.main_loop import corner
from fusion_backend.kernels.gemm.specialised_loop import (
    count_of_tiles,
    multiply_tiles,
    shared_memory,
)


# Operations: 2 m n k a weight. Bytes: x, the weights and the results, once.
@jit(do_not_specialize=["m"])
def specialised_linear_kernel(
    X, W, W2, B, B2, SEED, OUT, KEPT, KEPT2, m,
    N: gl.constexpr, K: gl.constexpr, X_ROW: gl.constexpr, W_STRIDE: gl.constexpr,
    BY_OUTPUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, FINISHERS: gl.constexpr,
    W2_STRIDE: gl.constexpr, ACT: gl.constexpr, THRESHOLD: gl.constexpr, SCALE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    WEIGHTS: gl.constexpr = 1 if W2 is None else 2
    x_tiles, w_tiles, factors, parts, products, loaded, multiplied, stored = shared_memory(
        X.dtype.element_ty, WEIGHTS, BY_OUTPUT, BM, BN, BK, STAGES, PART
    )
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (X, W, W2, x_tiles, w_tiles, factors, products, loaded, multiplied, stored, m, N,
                 K, X_ROW, W_STRIDE, W2_STRIDE, BY_OUTPUT, KEPT is not None, BM, BN, BK, GROUP,
                 STAGES),
            ),
            (
                finish_tiles,
                (B, B2, SEED, OUT, KEPT, KEPT2, parts, multiplied, stored, m, N, ACT, THRESHOLD,
                 SCALE, WEIGHTS, BM, BN, GROUP, PART),
            ),
        ],
        [FINISHERS],
        [REGISTERS],
    )  # fmt: skip


@jit
def finish_tiles(
    B, B2, SEED, OUT, KEPT, KEPT2, parts, multiplied, stored, m,
    N: gl.constexpr, ACT: gl.constexpr, THRESHOLD: gl.constexpr, SCALE: gl.constexpr,
    WEIGHTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """The warps that finish: from the rounded sums to what is stored."""
    KIND: gl.constexpr = OUT.dtype.element_ty
    PARTS: gl.constexpr = BN // PART
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // PART, PART // 8], [gl.num_warps(), 1], [1, 0]
    )
    out_layout: gl.constexpr = parts.layout
    out = tma.make_tensor_descriptor(OUT, [m, N], [N, 1], [BM, PART], out_layout)
    kept = out
    kept2 = out
    if KEPT is not None:
        kept = tma.make_tensor_descriptor(KEPT, [m, N], [N, 1], [BM, PART], out_layout)
    if KEPT2 is not None:
        kept2 = tma.make_tensor_descriptor(KEPT2, [m, N], [N, 1], [BM, PART], out_layout)
    turn = 0
    for tile in range(gl.program_id(0), count_of_tiles(m, N, BM, BN), gl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        mbarrier.wait(multiplied.index(0), turn)
        if SEED is not None:
            for i in range(PARTS):
                mark_part(parts.index(i), SEED, top, left + i * PART, N, THRESHOLD, layout)
            fence_async_shared()
        if KEPT is not None:
            for i in gl.static_range(PARTS):
                store_tile(kept, [top, left + i * PART], parts.index(i))
                if KEPT2 is not None:
                    store_tile(kept2, [top, left + i * PART], parts.index(PARTS + i))
            tma.store_wait(0)  # the sums have been read, and may be written over
            thread_barrier()
        for i in gl.static_range(PARTS):
            place, column = parts.index(i), left + i * PART
            y = with_bias(place, B, column, N, PART, layout)
            y = epilogue(y, ACT, KIND, False)
            if SEED is not None:
                y *= SCALE
            if WEIGHTS == 2:
                y *= with_bias(parts.index(PARTS + i), B2, column, N, PART, layout)
            place.store(y.to(KIND))
            fence_async_shared()
            store_tile(out, [top, column], place)
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(stored.index(0))
        turn = turn ^ 1


@jit
def with_bias(part, B, left, N: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr):
    """The sums of a part and its bias, in fp32."""
    y = part.load(layout).to(gl.float32)
    if B is not None:
        column = left + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
        bias = gl.load(B + column, column < N, 0.0).to(gl.float32)
        y += gl.expand_dims(bias, 0)
    return y


@jit
def mark_part(
    part, SEED, top, left, N: gl.constexpr, THRESHOLD: gl.constexpr, layout: gl.constexpr
):
    """Say in shared memory what is dropped. The counters are those of linear.tile_counters."""
    ROWS: gl.constexpr = part.shape[0]
    PART: gl.constexpr = part.shape[1]
    quads: gl.constexpr = gl.BlockedLayout(
        [1, 2], [256 // PART, PART // 8], [gl.num_warps(), 1], [1, 0]
    )
    row = top + gl.arange(0, ROWS, layout=gl.SliceLayout(1, quads))
    column = left // 4 + gl.arange(0, PART // 4, layout=gl.SliceLayout(0, quads))
    counter = gl.expand_dims(row.to(gl.int64) * ((N + 3) // 4), 1) + gl.expand_dims(column, 0)
    a, b, c, d = random_words(gl.load(SEED), counter)
    words = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [ROWS, PART])
    words = gl.convert_layout(words.to(gl.uint32, bitcast=True), layout, assert_trivial=True)
    y = part.load(layout)
    part.store(mark(y.to(gl.float32), words >= THRESHOLD).to(y.dtype))
