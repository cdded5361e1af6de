"""dk and dv of attention: a program has a block of keys and walks through the queries, of all heads
that read them.
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
from fusion_backend.kernels.attention.ranges import (
    partial_block,
    partial_blocks,
    program_block,
    query_range,
)
from fusion_backend.kernels.attention.tiles import load_rows, row_pointer, survivors
from fusion_backend.kernels.common.launch import launch


def keys_gradients(operands: Operands, config: dict) -> tuple[Tensor, Tensor]:
    """dk `[b, h / group, m, d]` and dv `[b, h / group, m, e]`, in memory as k and v are. Grid:
    blocks of keys of all heads of k and batches.
    """
    k, v = operands.k, operands.v
    (b, heads, m, _), dk, dv = k.shape, empty_like_in_memory(k), empty_like_in_memory(v)
    operands = operands.with_documents(config["BN"], config["BM"])
    launch(
        flash_keys_kernel, ((m + config["BN"] - 1) // config["BN"] * b * heads,),
        *operands.tensors, dk, dv, *operands.numbers, *row_strides(dk), *row_strides(dv),
        **operands.constants, **config,
    )  # fmt: skip
    return dk, dv


# Operations: 4 b h n m (d + e), of those keys that are seen. Bytes: q, k, v, do, dk, dv and the
# masks once.
@triton.jit
def flash_keys_kernel(
    Q, K, V, DO, LSE, SUMS, DK, DV,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # with a lower band the first have the most queries
    j0, kv_head, batch = program_block(m, heads // group, BN)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(col, m - 1 - j0)
    K = row_pointer(K, (k_batch, k_head, k_row), batch, kv_head, j0)
    k = load_rows(K, inside, k_row, D, BD, UPCAST)
    V = row_pointer(V, (v_batch, v_head, v_row), batch, kv_head, j0)
    v = load_rows(V, inside, v_row, E, BE, UPCAST)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    left, begin, stop, end = query_range(SEEN, batch, j0, n, m, low, high, KEYS_ARE, SKIPS, BM, BN)
    for g in tl.range(0, group):
        head = kv_head * group + g
        masks = (
            (BIAS, (bias_batch, bias_head, bias_row, bias_col), bias_period),
            (KEEP, (keep_batch, keep_head, keep_row, keep_col)),
            (KEYS, (keys_batch, keys_col)), (low, high), SEED, (batch, head, heads, n, m),
        )  # fmt: skip
        q = row_pointer(Q, (q_batch, q_head, q_row), batch, head, 0)
        do = row_pointer(DO, (do_batch, do_head, do_row), batch, head, 0)
        before = (batch * heads + head) * n
        for start in tl.range(begin, stop, BM):
            dk, dv = keys_step(
                dk, dv, k, v, q, do, LSE, SUMS, before, masks, row, col, start, j0, n,
                q_row, do_row, SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST,
                PRECISION, False,
            )  # fmt: skip
        for t in tl.range(0, partial_blocks(left, begin, stop, end, BM)):
            dk, dv = keys_step(
                dk, dv, k, v, q, do, LSE, SUMS, before, masks, row, col,
                partial_block(t, left, begin, stop, BM), j0, n,
                q_row, do_row, SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, RESCALE, D, E, UPCAST,
                PRECISION, True,
            )  # fmt: skip
    d, e, inside = tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :], col[:, None] < m - j0
    if SEED is not None:
        dv *= RESCALE
    DK = row_pointer(DK, (dk_batch, dk_head, dk_row), batch, kv_head, j0)
    tl.store(DK + col[:, None] * dk_row + d, dk * SCALE, inside & (d < D))
    DV = row_pointer(DV, (dv_batch, dv_head, dv_row), batch, kv_head, j0)
    tl.store(DV + col[:, None] * dv_row + e, dv, inside & (e < E))


@triton.jit
def keys_step(
    dk, dv, k, v, Q, DO, LSE, SUMS, before, masks, row, col, start, j0, n, q_row, do_row,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, KEYS_ARE: tl.constexpr,
    THRESHOLD: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with the queries of one block. Scores are transposed: [keys, queries]."""
    bias, keep, keys, band, seed, at = masks
    BIAS = bias[0]
    inside = tl.minimum(row, n - 1 - start) if MASKED else row
    Q += tl.cast(start, tl.int64) * q_row
    q = load_rows(Q, inside, q_row, D, dk.shape[1], UPCAST)
    DO += tl.cast(start, tl.int64) * do_row
    do = load_rows(DO, inside, do_row, E, dv.shape[1], UPCAST)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    lse, inverse = saved_of_rows(LSE, before, start + inside, n, BIAS)
    if MASKED:
        lse = tl.where(row < n - start, lse, float("inf"))
    p, visible = probabilities(
        s, lse[None, :], inverse[None, :], masks, row[None, :], col[:, None], start, j0,
        SCALE, CAP, FILL, KEYS_ARE, MASKED,
    )  # fmt: skip
    p_left = p
    if seed is not None:
        left = survivors(masks, start, j0, s.shape[1], s.shape[0], THRESHOLD, True)
        p_left = tl.where(left, p, 0.0)
    dv = tl.dot(p_left.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if seed is not None:
        dp = tl.where(left, dp * RESCALE, 0.0)
    sums = tl.load(SUMS + before + (start + inside))  # not before: they would spill
    _, ds = score_gradient(s, p, dp, sums[None, :], visible, SCALE, CAP, FILL)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv
