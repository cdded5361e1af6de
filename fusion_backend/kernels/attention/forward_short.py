"""Short attention: the scores of a head are one tile, as in windows of Swin. A program walks
through heads and batches that share a bias, which it reads once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.attention.configs import config_of, constants_of, row_strides
from fusion_backend.kernels.attention.masking import Masking, mask_arguments
from fusion_backend.kernels.attention.parts import groups_of
from fusion_backend.kernels.attention.tiles import (
    bias_tile,
    exponential,
    masked,
    program_part,
    row_pointer,
    rows_of_head,
    survivors,
)
from fusion_backend.kernels.common.launch import launch

CONFIG = config_of(64, 64, 4, 3)  # timed by benchmarks/results/sweep-short-attention.json


def short_forward(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, save: bool
) -> tuple[Tensor, Tensor]:
    """As forward, up to 64 queries and keys. Grid: biases times parts, see groups_of."""
    (b, h, n, _), e = q.shape, v.shape[3]
    out = torch.empty((b, n, h, e), dtype=q.dtype, device=q.device).transpose(1, 2)
    shape = (b, h, n) if masking.bias is None else (b, h, 2, n)
    lse = torch.empty(shape if save else (0,), dtype=torch.float32, device=q.device)
    masks = mask_arguments(q, k, masking, ranges=False)
    batches, heads, parts = groups_of(q, masks.bias)
    launch(
        flash_short_kernel, (batches * heads * parts,),
        q, k, v, out, lse if save else None, *masks.flat(),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(out),
        b, batches, heads, parts,
        NAN=masking.hidden == "nan", **constants_of(q, v, masking), **CONFIG,
    )  # fmt: skip
    return out, lse


# Operations: 2 b h n m (d + e). Bytes: q, k, v and out once, and the bias once for each part.
@triton.jit
def flash_short_kernel(
    Q, K, V, OUT, LSE,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, batches, bias_batches, bias_heads, parts,
    NAN: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    shared_batch, shared_head, first = program_part(parts, bias_heads)
    row, col, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BE)[None, :]
    if SEED is not None:
        SEED = tl.load(SEED)
    query, key = tl.minimum(row, n - 1), tl.minimum(col, m - 1)
    if BIAS is not None:
        strides = bias_batch, bias_head, bias_row, bias_col
        BIAS = bias_tile(BIAS, strides, shared_batch, shared_head, query, key)
    sum_heads = heads // bias_heads
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
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _ = masked(s, masks, row[:, None], col[None, :], 0, 0, SCALE, CAP, FILL, KEYS_ARE, True)
        top = tl.max(s, 1)
        p = exponential(s - tl.where(top == float("-inf"), 0.0, top)[:, None], BIAS)
        total = tl.sum(p, 1)
        lse = top + tl.log2(total) if BIAS is None else top
        if not NAN:  # with nothing seen: a result of 0, and no gradient
            lse = tl.where(total == 0.0, float("inf"), lse)
            total = tl.where(total == 0.0, 1.0, total)
        if SEED is not None:
            p = tl.where(survivors(masks, 0, 0, BM, BN, THRESHOLD, False), p * RESCALE, 0.0)
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
        rows = row_pointer(OUT, (out_batch, out_head, out_row), batch, head, 0)
        tl.store(rows + row[:, None] * out_row + e, out, (row[:, None] < n) & (e < E))
        if LSE is not None:
            at = LSE + (batch * heads + head) * n * (1 if BIAS is None else 2) + row
            tl.store(at, lse, row < n)
            if BIAS is not None:
                tl.store(at + n, total, row < n)
