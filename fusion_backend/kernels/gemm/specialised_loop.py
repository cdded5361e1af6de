"""The half of a warp-specialised kernel that multiplies, and the shared memory between the halves.

Eight warps multiply tiles of 128 rows, as two groups of four with 64 rows each, and round the sums
to 16 bits into shared memory, where others read them. They also ask for their operands, across
tiles; three steps are loaded or multiplied at a time. A warp of its own for that would leave 128
registers a thread, and the sums alone take 128.
"""

from __future__ import annotations

from fusion_backend.compat.gluon import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    reinterpret,
    thread_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fusion_backend.kernels.gemm.main_loop import corner


@jit
def shared_memory(
    KIND: gl.constexpr, WEIGHTS: gl.constexpr, BY_OUTPUT: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The operands of all stages, the products of a tile, by parts and whole, and the barriers."""
    WIDTH: gl.constexpr = BN * WEIGHTS
    TILE: gl.constexpr = [BN, BK] if BY_OUTPUT else [BK, BN]
    BOTH: gl.constexpr = [WIDTH, BK] if BY_OUTPUT else [BK, WIDTH]
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], KIND)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, KIND)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PART], KIND)
    x_tiles = gl.allocate_shared_memory(KIND, [STAGES, BM, BK], x_layout)
    # The tiles of the two weights are requested one by one and multiplied as one, side by side.
    w_tiles = gl.allocate_shared_memory(KIND, [STAGES * WEIGHTS] + TILE, w_layout)
    factors = reinterpret(w_tiles, KIND, [STAGES] + BOTH, w_layout)
    # So are the parts of a result.
    parts = gl.allocate_shared_memory(KIND, [WIDTH // PART, BM, PART], out_layout)
    products = reinterpret(parts, KIND, [BM, WIDTH], out_layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    multiplied = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    mbarrier.init(multiplied.index(0), count=1)
    mbarrier.init(stored.index(0), count=1)
    fence_async_shared()
    thread_barrier()
    return x_tiles, w_tiles, factors, parts, products, loaded, multiplied, stored


@jit
def count_of_tiles(m, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    return (m + BM - 1) // BM * ((N + BN - 1) // BN)


@jit
def last_of(tile, m, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """The tile, or the last that there is: programs look further ahead than there are tiles."""
    return gl.minimum(tile, count_of_tiles(m, N, BM, BN) - 1)


@jit
def request(
    x, w, w2, x_tiles, w_tiles, loaded, stage, top, left, start, wanted,
    BYTES: gl.constexpr, WEIGHTS: gl.constexpr, BY_OUTPUT: gl.constexpr,
):  # fmt: skip
    """Begin to load the operands of a step into the memory of `stage`."""
    ready = loaded.index(stage)
    mbarrier.expect(ready, BYTES, pred=wanted)
    load_tile(x, [top, start], ready, x_tiles.index(stage), pred=wanted)
    place = [left, start] if BY_OUTPUT else [start, left]
    load_tile(w, place, ready, w_tiles.index(stage * WEIGHTS), pred=wanted)
    if WEIGHTS == 2:
        load_tile(w2, place, ready, w_tiles.index(stage * WEIGHTS + 1), pred=wanted)


@jit
def next_step(
    tile, top, left, start, m, N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The step to request next: of this tile, or the first of the program's next one."""
    start += BK
    if start >= K:
        start = 0
        tile += gl.num_programs(0)
        top, left = corner(last_of(tile, m, N, BM, BN), m, N, BM, BN, GROUP)
    return tile, top, left, start


@jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next of the memories that are used in turn, and in which phase its barrier will be."""
    stage += 1
    over = stage == STAGES
    return gl.where(over, 0, stage), gl.where(over, phase ^ 1, phase)


@jit
def weight_matrix(
    W, N: gl.constexpr, K: gl.constexpr, STRIDE: gl.constexpr, BY_OUTPUT: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    if BY_OUTPUT:
        matrix = tma.make_tensor_descriptor(W, [N, K], [STRIDE, 1], [BN, BK], layout)
    else:
        matrix = tma.make_tensor_descriptor(W, [K, N], [STRIDE, 1], [BK, BN], layout)
    return matrix


@jit
def multiply_step(x_tiles, factors, stage, total, BY_OUTPUT: gl.constexpr):
    """total + x w, begun: the step before is done when this returns."""
    factor = factors.index(stage)
    if BY_OUTPUT:
        factor = factor.permute((1, 0))
    total = warpgroup_mma(x_tiles.index(stage), factor, total, is_async=True)
    return warpgroup_mma_wait(1, deps=(total,))


@jit
def multiply_tiles(
    X, W, W2, x_tiles, w_tiles, factors, products, loaded, multiplied, stored, m,
    N: gl.constexpr, K: gl.constexpr, X_ROW: gl.constexpr, W_STRIDE: gl.constexpr,
    W2_STRIDE: gl.constexpr, BY_OUTPUT: gl.constexpr, KEEP: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply: from the operands to the rounded sums."""
    KIND: gl.constexpr = X.dtype.element_ty
    WEIGHTS: gl.constexpr = 1 if W2 is None else 2
    WIDTH: gl.constexpr = BN * WEIGHTS
    BYTES: gl.constexpr = (BM + WIDTH) * BK * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDTH, 16]
    )
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], KIND)
    x = tma.make_tensor_descriptor(X, [m, K], [X_ROW, 1], [BM, BK], x_layout)
    w_layout: gl.constexpr = w_tiles.layout
    w = weight_matrix(W, N, K, W_STRIDE, BY_OUTPUT, BN, BK, w_layout)
    w2 = w
    if W2 is not None:
        w2 = weight_matrix(W2, N, K, W2_STRIDE, BY_OUTPUT, BN, BK, w_layout)
    tiles = count_of_tiles(m, N, BM, BN)
    ahead = gl.program_id(0)
    top, left = corner(last_of(ahead, m, N, BM, BN), m, N, BM, BN, GROUP)
    start = 0
    for stage in gl.static_range(STAGES):
        request(
            x, w, w2, x_tiles, w_tiles, loaded, stage, top, left, start, ahead < tiles,
            BYTES, WEIGHTS, BY_OUTPUT,
        )  # fmt: skip
        ahead, top, left, start = next_step(ahead, top, left, start, m, N, K, BM, BN, BK, GROUP)
    stage, phase, turn = 0, 0, 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros([BM, WIDTH], gl.float32, layout)
        mbarrier.wait(loaded.index(stage), phase)
        total = multiply_step(x_tiles, factors, stage, total, BY_OUTPUT)
        done = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _step in range(BK, K, BK):
            mbarrier.wait(loaded.index(stage), phase)
            total = multiply_step(x_tiles, factors, stage, total, BY_OUTPUT)
            thread_barrier()  # both groups have read the operands of the step before
            request(
                x, w, w2, x_tiles, w_tiles, loaded, done, top, left, start, ahead < tiles,
                BYTES, WEIGHTS, BY_OUTPUT,
            )  # fmt: skip
            ahead, top, left, start = next_step(ahead, top, left, start, m, N, K, BM, BN, BK, GROUP)
            done = stage
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, deps=(total,))
        thread_barrier()
        request(
            x, w, w2, x_tiles, w_tiles, loaded, done, top, left, start, ahead < tiles,
            BYTES, WEIGHTS, BY_OUTPUT,
        )  # fmt: skip
        ahead, top, left, start = next_step(ahead, top, left, start, m, N, K, BM, BN, BK, GROUP)
        mbarrier.wait(stored.index(0), turn ^ 1)  # the tile before has left the memory
        products.store(total.to(KIND))
        if KEEP:
            fence_async_shared()
        thread_barrier()
        mbarrier.arrive(multiplied.index(0))
        turn = turn ^ 1
