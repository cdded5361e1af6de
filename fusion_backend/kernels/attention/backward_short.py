"""All gradients of short attention in one pass: the scores of a head are one tile, as in windows of
Swin. A program walks through heads and batches, reads the operands of each once, and adds up the
gradient of a bias that they share. The rows of the tile are whole: rowsum(p · dp), which equals
rowsum(do · out), takes the place of a pass over the result.
"""

from __future__ import annotations

import torch
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
from fusion_backend.kernels.attention.parts import groups_of
from fusion_backend.kernels.attention.tiles import (
    bias_tile,
    program_part,
    row_pointer,
    rows_of_head,
    survivors,
)
from fusion_backend.kernels.common.launch import launch


def short_gradients(
    operands: Operands, of_bias: tuple[tuple, torch.dtype] | None, config: dict
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv, in memory as q, k and v are, and the sums of the scores' gradients of the
    shape and dtype `of_bias`, `[b or 1, h or 1, n, m]`, over what shares a bias; in fp32 if they
    are sums of parts. Grid: biases times parts, see groups_of.
    """
    q, k, v = operands.q, operands.k, operands.v
    gradients = tuple(empty_like_in_memory(t) for t in (q, k, v))
    batches, heads, parts = groups_of(q, operands.masks.bias)
    db = None
    if of_bias:
        shape, dtype = of_bias
        dtype = dtype if parts == 1 else torch.float32
        db = torch.empty((parts, *shape), dtype=dtype, device=q.device)
    launch(
        flash_short_gradients_kernel, (batches * heads * parts,),
        *operands.tensors, *gradients, db, *operands.numbers,
        *(stride for t in gradients for stride in row_strides(t)),
        *strides_of(None if db is None else db[0]), 0 if db is None else db.stride(0),
        q.shape[0], batches, heads, parts, **operands.constants, **config,
    )  # fmt: skip
    if db is not None:
        db = db[0] if parts == 1 else db.sum(0)
    return *gradients, db


# Operations: 2 b h n m (3 d + 2 e). Bytes: q, k, v, do, dq, dk and dv once.
@triton.jit
def flash_short_gradients_kernel(
    Q, K, V, DO, LSE, SUMS, DQ, DK, DV, DB,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row, db_batch, db_head, db_row, db_col, db_part,
    batches, bias_batches, bias_heads, parts,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    shared_batch, shared_head, first = program_part(parts, bias_heads)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    d, e = tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :]
    if SEED is not None:
        SEED = tl.load(SEED)
    query, key = tl.minimum(row, n - 1), tl.minimum(col, m - 1)
    if BIAS is not None:
        strides = bias_batch, bias_head, bias_row, bias_col
        BIAS = bias_tile(BIAS, strides, shared_batch, shared_head, query, key)
    sum_heads = heads // bias_heads
    db = tl.zeros([BM, BN], tl.float32)
    for t in tl.range(first, batches // bias_batches * sum_heads, parts):
        batch = shared_batch + t // sum_heads * bias_batches
        head = shared_head + t % sum_heads
        masks = (
            (BIAS, None, None), (KEEP, (keep_batch, keep_head, keep_row, keep_col)),
            (KEYS, (keys_batch, keys_col)), (low, high), SEED, (batch, head, heads, n, m),
        )  # fmt: skip
        q = rows_of_head(Q, (q_batch, q_head, q_row), batch, head, query, D, BD, UPCAST)
        k = rows_of_head(K, (k_batch, k_head, k_row), batch, head, key, D, BD, UPCAST)
        v = rows_of_head(V, (v_batch, v_head, v_row), batch, head, key, E, BE, UPCAST)
        do = rows_of_head(DO, (do_batch, do_head, do_row), batch, head, query, E, BE, UPCAST)
        lse, inverse = saved_of_rows(LSE, (batch * heads + head) * n, query, n, BIAS)
        lse = tl.where(row < n, lse, float("inf"))
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, visible = probabilities(
            s, lse[:, None], inverse[:, None], masks, row[:, None], col[None, :], 0, 0,
            SCALE, CAP, FILL, KEYS_ARE, True,
        )  # fmt: skip
        p_left = p
        if SEED is not None:
            left = survivors(masks, 0, 0, BM, BN, THRESHOLD, False)
            p_left = tl.where(left, p * RESCALE, 0.0)
        dv = tl.dot(tl.trans(p_left.to(do.dtype)), do, input_precision=PRECISION)
        rows = row_pointer(DV, (dv_batch, dv_head, dv_row), batch, head, 0)
        tl.store(rows + col[:, None] * dv_row + e, dv, (col[:, None] < m) & (e < E))
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if SEED is not None:
            dp = tl.where(left, dp * RESCALE, 0.0)
        sums = tl.sum(p * dp, 1)
        of_scores, ds = score_gradient(s, p, dp, sums[:, None], visible, SCALE, CAP, FILL)
        if DB is not None:
            db += of_scores
        ds = ds.to(q.dtype)
        dq = tl.dot(ds, k, input_precision=PRECISION) * SCALE
        rows = row_pointer(DQ, (dq_batch, dq_head, dq_row), batch, head, 0)
        tl.store(rows + row[:, None] * dq_row + d, dq, (row[:, None] < n) & (d < D))
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * SCALE
        rows = row_pointer(DK, (dk_batch, dk_head, dk_row), batch, head, 0)
        tl.store(rows + col[:, None] * dk_row + d, dk, (col[:, None] < m) & (d < D))
    if DB is not None:
        DB += first.to(tl.int64) * db_part
        DB = row_pointer(DB, (db_batch, db_head, db_row), shared_batch, shared_head, 0)
        inside = (row[:, None] < n) & (col[None, :] < m)
        tl.store(DB + row[:, None] * db_row + col[None, :] * db_col, db, inside)
