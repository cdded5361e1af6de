"""dq of attention, and the gradient of a bias that no batches or heads share: a program has a block
of queries and walks through the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.attention.backward_common import (
    Operands,
    empty_like_in_memory,
    probabilities,
    saved_of_rows,
    score_gradient,
)
from fusion_backend.kernels.attention.configs import row_strides
from fusion_backend.kernels.attention.masking import strides_of
from fusion_backend.kernels.attention.ranges import (
    key_range,
    partial_block,
    partial_blocks,
    program_block,
)
from fusion_backend.kernels.attention.tiles import load_rows, row_pointer, survivors
from fusion_backend.kernels.common.launch import launch


def queries_gradient(operands: Operands, db: Tensor | None, config: dict) -> Tensor:
    """dq `[b, h, n, d]`, in memory as q is; fills db `[b, h, n, m]` where it is given, but for what
    is left out. Grid: blocks of queries of all heads and batches.
    """
    (b, h, n, _), dq = operands.q.shape, empty_like_in_memory(operands.q)
    operands = operands.with_documents(config["BM"], config["BN"])
    launch(
        flash_queries_kernel, ((n + config["BM"] - 1) // config["BM"] * b * h,),
        *operands.tensors, dq, db, *operands.numbers, *row_strides(dq), *strides_of(db),
        **operands.constants, **config,
    )  # fmt: skip
    return dq


# Operations: 2 b h n m (2 d + e), of those keys that are seen. Bytes: q, k, v, do, dq and the masks
# once.
@triton.jit
def flash_queries_kernel(
    Q, K, V, DO, LSE, SUMS, DQ, DB,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dq_batch, dq_head, dq_row, db_batch, db_head, db_row, db_col,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0, head, batch = program_block(n, heads, BM, low)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(row, n - 1 - i0)
    K = row_pointer(K, (k_batch, k_head, k_row), batch, head // group, 0)
    V = row_pointer(V, (v_batch, v_head, v_row), batch, head // group, 0)
    if DB is not None:
        DB = row_pointer(DB, (db_batch, db_head, db_row), batch, head, i0)
    masks = (
        (BIAS, (bias_batch, bias_head, bias_row, bias_col), bias_period),
        (KEEP, (keep_batch, keep_head, keep_row, keep_col)),
        (KEYS, (keys_batch, keys_col)), (low, high), SEED, (batch, head, heads, n, m),
    )  # fmt: skip
    Q = row_pointer(Q, (q_batch, q_head, q_row), batch, head, i0)
    q = load_rows(Q, inside, q_row, D, BD, UPCAST)
    DO = row_pointer(DO, (do_batch, do_head, do_row), batch, head, i0)
    do = load_rows(DO, inside, do_row, E, BE, UPCAST)
    before = (batch * heads + head) * n
    lse, inverse = saved_of_rows(LSE, before, i0 + inside, n, BIAS)
    of_rows = lse, inverse, tl.load(SUMS + before + (i0 + inside))
    dq = tl.zeros([BM, BD], tl.float32)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, KEYS_ARE, SKIPS, BM, BN)
    for start in tl.range(begin, stop, BN):
        dq, ds = queries_step(
            dq, q, do, of_rows, K, V, masks, row, col, i0, start, m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST, PRECISION, False,
        )  # fmt: skip
        if DB is not None:
            at = DB + row[:, None] * db_row + (start + col)[None, :] * db_col
            tl.store(at, ds, row[:, None] < n - i0)
    for t in tl.range(0, partial_blocks(left, begin, stop, end, BN)):
        start = partial_block(t, left, begin, stop, BN)
        dq, ds = queries_step(
            dq, q, do, of_rows, K, V, masks, row, col, i0, start, m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST, PRECISION, True,
        )  # fmt: skip
        if DB is not None:
            within = (row[:, None] < n - i0) & (col[None, :] < m - start)
            at = DB + row[:, None] * db_row + (start + col)[None, :] * db_col
            tl.store(at, ds, within)
    d = tl.arange(0, BD)[None, :]
    DQ = row_pointer(DQ, (dq_batch, dq_head, dq_row), batch, head, i0)
    tl.store(DQ + row[:, None] * dq_row + d, dq * SCALE, (row[:, None] < n - i0) & (d < D))


@triton.jit
def queries_step(
    dq, q, do, of_rows, K, V, masks, row, col, i0, start, m, k_row, v_row,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, KEYS_ARE: tl.constexpr,
    THRESHOLD: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sum with the keys of one block, and the gradient of its scores. of_rows: what
    saved_of_rows gives, and rowsum(do · out).
    """
    bias, keep, keys, band, seed, at = masks
    lse, inverse, sums = of_rows
    inside = tl.minimum(col, m - 1 - start) if MASKED else col
    K += tl.cast(start, tl.int64) * k_row
    k = load_rows(K, inside, k_row, D, q.shape[1], UPCAST)
    V += tl.cast(start, tl.int64) * v_row
    v = load_rows(V, inside, v_row, E, do.shape[1], UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, visible = probabilities(
        s, lse[:, None], inverse[:, None], masks, row[:, None], col[None, :], i0, start,
        SCALE, CAP, FILL, KEYS_ARE, MASKED,
    )  # fmt: skip
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if seed is not None:
        left = survivors(masks, i0, start, s.shape[0], s.shape[1], THRESHOLD, False)
        dp = tl.where(left, dp * RESCALE, 0.0)
    of_scores, ds = score_gradient(s, p, dp, sums[:, None], visible, SCALE, CAP, FILL)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), of_scores
