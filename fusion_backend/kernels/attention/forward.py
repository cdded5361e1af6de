"""Attention without the scores in memory: softmax(scale · q kᵀ, masked) v, block by block of the
keys.

q is `[b, h, n, d]`, k and v `[b, h / group, m, d]`, d up to 256, in fp32, bf16 or fp16, of any
strides but the last, which is 1. Which keys j a query i sees is said by a band, low <= i - j <=
high, by a vector over the keys, and by a dense choice; a bias is added to the scores, which may be
capped before: cap · tanh(s / cap). Blocks that band or vector hide are not read, blocks that they
leave whole are not masked. Scores and sums are in fp32, scores in base 2, but in base e where a
bias is added: the least number of a dtype, in base 2, would be -infinity. The forward keeps the
logarithm, to that base, of each row's sum; with a bias the row's largest score and the sum, apart:
beside a score of -10³⁰ the logarithm would be lost. Dropout of the probabilities is by seed and
position (dropout.py). No sum is taken in memory, by atomic additions say, so that the bits are the
same every time. Source: Dao et al. 2022 and 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.tiles import (
    begins,
    edge,
    edges,
    key_range,
    masked,
    place,
    power,
    seen_kernel,
    survive,
    tile,
)
from fusion_backend.kernels.common.dropout import Dropout, scale, threshold
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import interpreted, launch

LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # of fp32


class Masking(NamedTuple):
    """What becomes of the scores.

    bias and keep: broadcast to `[b, h, n, m]`, added, and true where a key is seen; keys: `[b or 1,
    m]`, or of four dimensions, of which the two in the middle do not count, true where a key is
    seen (where it is padding, if `padded`); low and high: the band, or None. hidden: what a score
    that is not seen becomes. "zero" and "nan": -infinity, and a row that sees nothing is 0 or NaN;
    "fill": the number `fill`, which gives no gradient. cap: what the scores are capped at, before
    the bias. dropout: of the probabilities.
    """

    bias: Tensor | None = None
    keep: Tensor | None = None
    keys: Tensor | None = None
    padded: bool = False
    low: int | None = None
    high: int | None = None
    hidden: str = "zero"
    fill: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    dropout: Dropout | None = None


def shape_of(mask: Tensor) -> tuple:
    """Of four dimensions."""
    return (1,) * (4 - mask.dim()) + tuple(mask.shape)


def strides(mask: Tensor | None) -> tuple:
    """Of four dimensions, 0 where it broadcasts. The tensor stays as it is: Inductor would compute
    a view anew.
    """
    given = [] if mask is None else zip(mask.shape, mask.stride(), strict=True)
    found = [0 if statically_known_true(size == 1) else stride for size, stride in given]
    return (0, 0, 0, 0, *found)[-4:]


def rows_in_memory(mask: Tensor | None) -> Tensor | None:
    """With neighbouring keys next to each other: every block of queries of every head and batch
    reads such rows.
    """
    if (
        mask is None
        or statically_known_true(mask.shape[-1] == 1)
        or statically_known_true(mask.stride(-1) <= 1)
    ):
        return mask
    return mask.contiguous()


def of_keys(t: Tensor | None) -> tuple:
    """The strides of the batch and the keys."""
    return (
        (0, 0)
        if t is None
        else (0 if statically_known_true(t.shape[0] == 1) else t.stride(0), t.stride(-1))
    )


def rows_of(t: Tensor) -> tuple:
    return t.stride()[:3]


def laid_out(t: Tensor) -> Tensor:
    """An empty tensor like t: heads last in memory where t has them so."""
    b, h, n, d = t.shape
    if statically_known_true(t.stride(1) < t.stride(2)):
        return torch.empty((b, n, h, d), dtype=t.dtype, device=t.device).transpose(1, 2)
    return torch.empty((b, h, n, d), dtype=t.dtype, device=t.device)


# Queries and keys a block, warps and stages of flash_kernel, for heads of up to 64, 128 and 256
# numbers of 16 bits, by the kind of mask. Up to 128 chosen by
# benchmarks/results/sweep-attention.json, which has all but "dense keys".
FORWARD = {
    "plain": ((64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    "keys": ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    "dropout": ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    "dense": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
    "dense keys": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
    "dense dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2)),
}


def kind_of(masking: Masking) -> str:
    """dense: a tile of the mask or the bias is read too. keys and dropout, which wins over it, take
    registers.
    """
    more = "dropout" if masking.dropout is not None else "keys" if masking.keys is not None else ""
    dense = "dense" if masking.bias is not None or masking.keep is not None else ""
    return " ".join(filter(None, (dense, more))) or "plain"


def by_head(table: dict[str, tuple], kind: str, d: int) -> tuple[int, ...]:
    return table[kind][(d > 64) + (d > 128)]


def config_of(bm: int, bn: int, warps: int, stages: int) -> dict:
    return dict(BM=bm, BN=bn, num_warps=warps, num_stages=stages)


def forward_config(d: int, itemsize: int, kind: str, few: bool = False) -> dict:
    """By the head size, the bytes of a number, the kind of mask, and whether queries are few or the
    band narrow.
    """
    if itemsize == 4:
        return config_of(32, 16 if "dropout" in kind and d > 64 else 32, 8, 1)
    bm, bn, warps, stages = by_head(FORWARD, kind, d)
    if few and bm == 128:  # most of a large block would be hidden, or beyond the queries
        bm, bn, warps = 64, min(bn, 64 if d <= 128 else 32), 4
    return config_of(bm, bn, warps, stages)


def narrow(masking: Masking) -> bool:
    """Is there a band, and so narrow that large blocks would mostly compute what it hides?"""
    low, high = masking.low, masking.high
    return low is not None and high is not None and statically_known_true(high - low < 2048)


def chosen(q: Tensor, masking: Masking) -> dict:
    few = narrow(masking) or statically_known_true(q.shape[2] <= 64)
    return forward_config(number(q.shape[3]), q.element_size(), kind_of(masking), few)


def masks_of(q: Tensor, k: Tensor, masking: Masking) -> tuple[tuple, dict]:
    """The arguments and the constants that all kernels take for the masks."""
    bias, keep, keys = rows_in_memory(masking.bias), rows_in_memory(masking.keep), masking.keys
    low, high = masking.low, masking.high
    fills = masking.hidden == "fill"
    # Under a fill a row that sees nothing is the mean over all keys: then nothing may be left out.
    skips = not fills or (low is None and high is None and keep is None)
    seen = None
    if keys is not None:
        seen = torch.empty((q.shape[0], 3), dtype=torch.int32, device=q.device)
        launch(
            seen_kernel, (q.shape[0],), keys, seen, k.shape[2], *of_keys(keys),
            PADDED=masking.padded,
            ALL="always" if not skips else "none seen" if fills else "never", BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
    seed, p = masking.dropout or (None, 0.0)
    args = (
        bias, keep, keys, seen, seed, q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1],
        low, high,
        *strides(bias), *strides(keep), *of_keys(keys),
    )  # fmt: skip
    d, base = number(q.shape[-1]), LOG2E if bias is None else 1.0
    constants = dict(
        SCALE=masking.scale, CAP=masking.cap,
        FILL=max(masking.fill * base, LOWEST) if fills else None,
        PADDED=masking.padded, SKIPS=skips, THRESHOLD=threshold(p), RESCALE=scale(p), D=d,
        BD=max(16, triton.next_power_of_2(d)), UPCAST=interpreted(flash_kernel),
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    )  # fmt: skip
    return args, constants


def forward(
    q, k, v, masking: Masking, save: bool, config: dict | None = None
) -> tuple[Tensor, Tensor]:
    """The result, heads last in memory, and the logarithm of each row's sum `[b, h, n]`, with a
    bias its largest score and its sum `[b, h, 2, n]`. Grid: blocks of queries.
    """
    b, h, n, d = q.shape
    config = config or chosen(q, masking)
    out = torch.empty((b, n, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    kept = (b, h, n) if masking.bias is None else (b, h, 2, n)
    lse = torch.empty(kept if save else (0,), dtype=torch.float32, device=q.device)
    args, constants = masks_of(q, k, masking)
    launch(
        flash_kernel, ((n + config["BM"] - 1) // config["BM"] * b * h,), q, k, v, out,
        lse if save else None, *args,
        *rows_of(q), *rows_of(k), *rows_of(v), *rows_of(out), NAN=masking.hidden == "nan",
        **constants, **config,
    )  # fmt: skip
    return out, lse


# Operations: 4 b h n m d, of those keys that are seen. Bytes: q, k, v, out and the masks once.
@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE, BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, b0, b1, b2, b3,
    p0, p1, p2, p3,
    y0, y1, q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, NAN: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FILL: tl.constexpr, PADDED: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr,
    RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    i0, head, batch = place(n, heads, BM, low)  # with a lower band the longest rows first
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(row, n - 1 - i0)
    K = begins(K, batch, head // group, 0, k0, k1, k2)
    V = begins(V, batch, head // group, 0, v0, v1, v2)
    masks = (
        BIAS, KEEP, KEYS, SEED, batch, head, heads, n, m, low, high, b0, b1, b2, b3, p0, p1, p2, p3,
        y0, y1
    )  # fmt: skip
    q = tile(begins(Q, batch, head, i0, q0, q1, q2), inside, q2, D, BD, UPCAST)
    acc = tl.zeros([BM, BD], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, SKIPS, BM, BN)
    for start in tl.range(begin, stop, BN):
        acc, top, total = flash_step(
            acc, top, total, q, K, V, masks, row, col, i0, start, m, k2, v2, SCALE, CAP, FILL,
            PADDED, THRESHOLD,
            D, UPCAST, PRECISION, False,
        )  # fmt: skip
    for t in tl.range(0, edges(left, begin, stop, end, BN)):
        acc, top, total = flash_step(
            acc, top, total, q, K, V, masks, row, col, i0, edge(t, left, begin, stop, BN), m, k2,
            v2, SCALE, CAP,
            FILL, PADDED, THRESHOLD, D, UPCAST, PRECISION, True,
        )  # fmt: skip
    lse = top + tl.log2(total) if BIAS is None else top
    if not NAN:  # with nothing seen: a result of 0, and no gradient
        lse = tl.where(total == 0.0, float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (RESCALE / total)[:, None] if SEED is not None else acc / total[:, None]
    d = tl.arange(0, BD)[None, :]
    OUT = begins(OUT, batch, head, i0, o0, o1, o2)
    tl.store(OUT + row[:, None] * o2 + d, acc, (row[:, None] < n - i0) & (d < D))
    if LSE is not None:
        LSE += (batch * heads + head) * n * (1 if BIAS is None else 2) + i0
        tl.store(LSE + row, lse, row < n - i0)
        if BIAS is not None:
            tl.store(LSE + n + row, total, row < n - i0)


@triton.jit
def flash_step(
    acc, top, total, q, K, V, masks, row, col, i0, start, m, k2, v2, SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FILL: tl.constexpr, PADDED: tl.constexpr, THRESHOLD: tl.constexpr, D: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with the keys of one block."""
    at = tl.minimum(col, m - 1 - start) if MASKED else col
    k = tile(K + tl.cast(start, tl.int64) * k2, at, k2, D, acc.shape[1], UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED or masks[0] is not None or masks[1] is not None or CAP is not None:
        s, _ = masked(
            s, masks, row[:, None], col[None, :], i0, start, SCALE, CAP, FILL, PADDED, MASKED
        )
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far
        p = power(s - shift[:, None], masks[0])
    else:
        new = tl.maximum(top, tl.max(s, 1) * (SCALE * 1.4426950408889634))
        shift = new
        p = tl.exp2(s * (SCALE * 1.4426950408889634) - shift[:, None])
    share = power(top - shift, masks[0])
    total = total * share + tl.sum(p, 1)
    if masks[3] is not None:
        p = tl.where(survive(masks, i0, start, s.shape[0], s.shape[1], THRESHOLD, False), p, 0.0)
    v = tile(V + tl.cast(start, tl.int64) * v2, at, v2, D, acc.shape[1], UPCAST)
    acc = tl.dot(p.to(v.dtype), v, acc * share[:, None], input_precision=PRECISION)
    return acc, new, total
