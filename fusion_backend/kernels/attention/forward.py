"""Attention without the scores in memory: softmax(scale · q kᵀ, masked) v, block by block of the
keys. A sink is one score more in each row's sum. The heads of v may have another size than those of
q and k.

Blocks that band or vector hide are not read, blocks that they leave whole are not masked. Scores
and sums are in fp32, scores in base 2, but in base e where a bias is added: the least number of a
dtype, in base 2, would be -infinity. The forward keeps the logarithm, to that base, of each row's
sum; with a bias the row's largest score and the sum, apart: beside a score of -10³⁰ the logarithm
would be lost. Dropout of the probabilities is by seed and position (common/dropout.py). No sum is
taken in memory, by atomic additions say, so that the bits are the same every time. Source: Dao et
al. 2022 and 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.configs import (
    column_of,
    config_of,
    constants_of,
    kind_of,
    narrow,
    row_strides,
    short,
)
from fusion_backend.kernels.attention.documents import with_documents
from fusion_backend.kernels.attention.forward_short import short_forward
from fusion_backend.kernels.attention.masking import Masking, mask_arguments, strides_of
from fusion_backend.kernels.attention.ranges import (
    key_range,
    partial_block,
    partial_blocks,
    program_block,
)
from fusion_backend.kernels.attention.tiles import (
    exponential,
    load_rows,
    masked,
    row_pointer,
    survivors,
)
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch

# Queries and keys a block, warps and stages of flash_kernel, for heads of up to 64, 128 and 256
# numbers of 16 bits, and for heads of more than 128 with values of at most 128, by the kind of
# mask. Up to 128 chosen by benchmarks/results/sweep-attention.json, which has all but "dense keys";
# the last "plain" by sweep-latent-attention.json. The others of the last two columns do not spill,
# and have not been timed.
FORWARD = {
    "plain": ((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
    "keys": ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
    "dropout": ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
    "dense": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2)),
    "dense keys": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2)),
    "dense dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 2)),
}


def forward_config(column: int, itemsize: int, kind: str, few: bool = False) -> dict:
    """By the sizes of the heads, the bytes of a number, the kind of mask, and whether queries are
    few or the band narrow.
    """
    if itemsize == 4:
        return config_of(32, 16 if "dropout" in kind and column > 0 else 32, 8, 1)
    bm, bn, warps, stages = FORWARD[kind][column]
    if few and bm == 128:  # most of a large block would be hidden, or beyond the queries
        bm, bn, warps = 64, min(bn, 32 if column >= 2 else 64), 4
    return config_of(bm, bn, warps, stages)


def config_for(q: Tensor, v: Tensor, masking: Masking) -> dict:
    """The configuration of the forward for q `[b, h, n, d]` and v `[b, h / group, m, e]`."""
    column, item, kind = column_of(q, v), q.element_size(), kind_of(masking)
    small = statically_known_true(q.shape[2] <= 64)
    narrow_heads = max(number(q.shape[3]), number(v.shape[3])) <= 32
    if small and item == 2 and narrow_heads and kind.startswith("dense"):
        return config_of(64, 32, 4, 2)  # with 64 keys it spills
    return forward_config(column, item, kind, small or narrow(masking))


def forward(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, save: bool, config: dict | None = None
) -> tuple[Tensor, Tensor]:
    """The result `[b, h, n, e]` in q's dtype, heads last in memory, and the logarithm of each row's
    sum `[b, h, n]` in fp32, with a bias its largest score and its sum `[b, h, 2, n]`; empty unless
    saved.

    q is `[b, h, n, d]`, k `[b, h / group, m, d]` and v `[b, h / group, m, e]`, d and e up to 256,
    all in fp32, bf16 or fp16, of any strides but the last, which is 1. Grid: blocks of queries of
    all heads and batches; where scores are one tile, as short_forward.
    """
    if config is None and short(q, k, v, masking, 64):
        return short_forward(q, k, v, masking, save)
    b, h, n, _ = q.shape
    config = config or config_for(q, v, masking)
    out = torch.empty((b, n, h, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    shape = (b, h, n) if masking.bias is None else (b, h, 2, n)
    lse = torch.empty(shape if save else (0,), dtype=torch.float32, device=q.device)
    masks = mask_arguments(q, k, masking)
    masks = with_documents(masks, b, masking.keys_are, config["BM"], config["BN"])
    launch(
        flash_kernel, ((n + config["BM"] - 1) // config["BM"] * b * h,),
        q, k, v, out, lse if save else None, masking.sinks, *masks.flat(),
        *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(out),
        *strides_of(masking.sinks)[:3],
        NAN=masking.hidden == "nan", **constants_of(q, v, masking), **config,
    )  # fmt: skip
    return out, lse


# Operations: 2 b h n m (d + e), of those keys that are seen. Bytes: q, k, v, out and the masks
# once.
@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE, SINKS,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, sinks_batch, sinks_head, sinks_row,
    NAN: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0, head, batch = program_block(n, heads, BM, low)  # with a lower band the longest rows first
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(row, n - 1 - i0)
    K = row_pointer(K, (k_batch, k_head, k_row), batch, head // group, 0)
    V = row_pointer(V, (v_batch, v_head, v_row), batch, head // group, 0)
    masks = (
        (BIAS, (bias_batch, bias_head, bias_row, bias_col), bias_period),
        (KEEP, (keep_batch, keep_head, keep_row, keep_col)),
        (KEYS, (keys_batch, keys_col)), (low, high), SEED, (batch, head, heads, n, m),
    )  # fmt: skip
    Q = row_pointer(Q, (q_batch, q_head, q_row), batch, head, i0)
    q = load_rows(Q, inside, q_row, D, BD, UPCAST)
    acc = tl.zeros([BM, BE], tl.float32)
    if SINKS is None:
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
    else:
        SINKS = row_pointer(SINKS, (sinks_batch, sinks_head, sinks_row), batch, head, i0)
        top = tl.load(SINKS + inside * sinks_row).to(tl.float32)
        top = top * 1.4426950408889634 if BIAS is None else top
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, KEYS_ARE, SKIPS, BM, BN)
    for start in tl.range(begin, stop, BN):
        acc, top, total = flash_step(
            acc, top, total, q, K, V, masks, row, col, i0, start, m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, D, E, UPCAST, PRECISION, False,
        )  # fmt: skip
    for t in tl.range(0, partial_blocks(left, begin, stop, end, BN)):
        acc, top, total = flash_step(
            acc, top, total, q, K, V, masks, row, col,
            i0, partial_block(t, left, begin, stop, BN), m, k_row, v_row,
            SCALE, CAP, FILL, KEYS_ARE, THRESHOLD, D, E, UPCAST, PRECISION, True,
        )  # fmt: skip
    lse = top + tl.log2(total) if BIAS is None else top
    if not NAN:  # with nothing seen: a result of 0, and no gradient
        lse = tl.where(total == 0.0, float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (RESCALE / total)[:, None] if SEED is not None else acc / total[:, None]
    e = tl.arange(0, BE)[None, :]
    OUT = row_pointer(OUT, (out_batch, out_head, out_row), batch, head, i0)
    tl.store(OUT + row[:, None] * out_row + e, acc, (row[:, None] < n - i0) & (e < E))
    if LSE is not None:
        LSE += (batch * heads + head) * n * (1 if BIAS is None else 2) + i0
        tl.store(LSE + row, lse, row < n - i0)
        if BIAS is not None:
            tl.store(LSE + n + row, total, row < n - i0)


@triton.jit
def flash_step(
    acc, top, total, q, K, V, masks, row, col, i0, start, m, k_row, v_row,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, KEYS_ARE: tl.constexpr,
    THRESHOLD: tl.constexpr, D: tl.constexpr, E: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with the keys of one block."""
    bias, keep, keys, band, seed, at = masks
    BIAS, KEEP = bias[0], keep[0]
    inside = tl.minimum(col, m - 1 - start) if MASKED else col
    K += tl.cast(start, tl.int64) * k_row
    k = load_rows(K, inside, k_row, D, q.shape[1], UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED or BIAS is not None or KEEP is not None or CAP is not None:
        s, _ = masked(
            s, masks, row[:, None], col[None, :], i0, start, SCALE, CAP, FILL, KEYS_ARE, MASKED
        )
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far
        p = exponential(s - shift[:, None], BIAS)
    else:
        new = tl.maximum(top, tl.max(s, 1) * (SCALE * 1.4426950408889634))
        shift = new
        p = tl.exp2(s * (SCALE * 1.4426950408889634) - shift[:, None])
    share = exponential(top - shift, BIAS)
    total = total * share + tl.sum(p, 1)
    if seed is not None:
        left = survivors(masks, i0, start, s.shape[0], s.shape[1], THRESHOLD, False)
        p = tl.where(left, p, 0.0)
    V += tl.cast(start, tl.int64) * v_row
    v = load_rows(V, inside, v_row, E, acc.shape[1], UPCAST)
    acc = tl.dot(p.to(v.dtype), v, acc * share[:, None], input_precision=PRECISION)
    return acc, new, total
