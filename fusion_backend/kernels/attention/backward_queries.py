"""dq of attention, the sums rowsum(do · out), and the gradient of a bias that no batches or heads
share: a program has a block of queries and walks through the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.attention.backward_common import (
    Operands,
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


class Tiles(NamedTuple):
    """What the kernel of dq also writes, for `[b, some heads, n, m]` of the scores."""

    score_gradients: Tensor
    # after dropout, and enlarged by it; strides as those of score_gradients
    probabilities: Tensor | None = None
    # the first head that they have, a number in int32; None: 0. Inductor would write a kernel of
    # its own for each int.
    first: Tensor | None = None


def queries_gradient(operands: Operands, dq: Tensor, tiles: Tiles | None, config: dict) -> None:
    """Fills dq `[b, h, n, d]`, operands.sums, and the tiles but for what is left out; for the heads
    that the tiles have, or all. Grid: blocks of queries of these heads of all batches.
    """
    b, h, n, _ = dq.shape
    operands = operands.with_documents(config["BM"], config["BN"])
    ds, p, first = tiles or (None, None, None)
    some = h if ds is None else ds.shape[1]
    launch(
        flash_queries_kernel, ((n + config["BM"] - 1) // config["BM"] * b * some,),
        *operands.tensors, operands.out, dq, ds, p, first, some, *operands.numbers,
        *row_strides(operands.out), *row_strides(dq), *strides_of(ds), **operands.constants,
        **config,
    )  # fmt: skip


# Operations: 2 b h n m (2 d + e), of those keys that are seen. Bytes: q, k, v, do, out, dq, the
# masks and the tiles once.
@triton.jit
def flash_queries_kernel(
    Q, K, V, DO, LSE, SUMS, OUT, DQ, DB, P, FIRST, some,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    db_batch, db_head, db_row, db_col,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0, at_head, batch = program_block(n, some, BM, low)
    head = at_head if FIRST is None else at_head + tl.load(FIRST)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(row, n - 1 - i0)
    K = row_pointer(K, (k_batch, k_head, k_row), batch, head // group, 0)
    V = row_pointer(V, (v_batch, v_head, v_row), batch, head // group, 0)
    if DB is not None:
        DB = row_pointer(DB, (db_batch, db_head, db_row), batch, at_head, i0)
    if P is not None:
        P = row_pointer(P, (db_batch, db_head, db_row), batch, at_head, i0)
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
    OUT = row_pointer(OUT, (out_batch, out_head, out_row), batch, head, i0)
    out = load_rows(OUT, inside, out_row, E, BE, UPCAST)
    sums = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(SUMS + before + (i0 + row), sums, row < n - i0)
    of_rows = lse, inverse, sums
    dq = tl.zeros([BM, BD], tl.float32)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, KEYS_ARE, SKIPS, BM, BN)
    within = row[:, None] < n - i0
    for start in tl.range(begin, stop, BN):
        dq, ds, p = queries_step(
            dq, q, do, of_rows, K, V, masks, row, col, i0, start, m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST, PRECISION, False,
        )  # fmt: skip
        at = row[:, None] * db_row + (start + col)[None, :] * db_col
        if DB is not None:
            tl.store(DB + at, ds, within)
        if P is not None:
            tl.store(P + at, p, within)
    for t in tl.range(0, partial_blocks(left, begin, stop, end, BN)):
        start = partial_block(t, left, begin, stop, BN)
        dq, ds, p = queries_step(
            dq, q, do, of_rows, K, V, masks, row, col, i0, start, m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST, PRECISION, True,
        )  # fmt: skip
        at = row[:, None] * db_row + (start + col)[None, :] * db_col
        if DB is not None:
            tl.store(DB + at, ds, within & (col[None, :] < m - start))
        if P is not None:
            tl.store(P + at, p, within & (col[None, :] < m - start))
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
    """The sum with the keys of one block, the gradient of its scores, and its probabilities after
    dropout. of_rows: what saved_of_rows gives, and rowsum(do · out).
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
    if seed is not None:
        p = tl.where(left, p * RESCALE, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), of_scores, p
