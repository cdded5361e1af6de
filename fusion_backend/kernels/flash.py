"""Attention without the scores in memory: softmax(scale · q kᵀ, masked) v, block by block of the keys.

q is `[b, h, n, d]`, k and v `[b, h / group, m, d]`, d up to 256, in fp32, bf16 or fp16, of any strides but the last,
which is 1. Which keys j a query i sees is said by a band, low <= i - j <= high, by a vector over the keys, and by a
dense choice; a bias is added to the scores, which may be capped before: cap · tanh(s / cap). Blocks that band or vector
hide are not read, blocks that they leave whole are not masked. Scores and sums are in fp32, scores in base 2, but in
base e where a bias is added: the least number of a dtype, in base 2, would be -infinity. The forward keeps the
logarithm, to that base, of each row's sum. Source: Dao et al. 2022 and 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from fusion_backend.kernels.inputs import number
from fusion_backend.kernels.launch import interpreted, launch

LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # of fp32


class Masking(NamedTuple):
    """What becomes of the scores.

    bias and keep: broadcast to `[b, h, n, m]`, added, and true where a key is seen; keys: `[b or 1, m]`, or of four
    dimensions, of which the two in the middle do not count, true where a key is seen (where it is padding, if
    `padded`); low and high: the band, or None. hidden: what a score that is not seen becomes. "zero" and "nan":
    -infinity, and a row that sees nothing is 0 or NaN; "fill": the number `fill`, which gives no gradient. cap: what
    the scores are capped at, before the bias.
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


def shape_of(mask: Tensor) -> tuple:
    """Of four dimensions."""
    return (1,) * (4 - mask.dim()) + tuple(mask.shape)


def strides(mask: Tensor | None) -> tuple:
    """Of four dimensions, 0 where it broadcasts. The tensor stays as it is: Inductor would compute a view anew."""
    given = [] if mask is None else zip(mask.shape, mask.stride(), strict=True)
    found = [0 if guard_or_false(size == 1) else stride for size, stride in given]
    return (0, 0, 0, 0, *found)[-4:]


def rows_in_memory(mask: Tensor | None) -> Tensor | None:
    """With neighbouring keys next to each other: every block of queries of every head and batch reads such rows."""
    apart = mask is not None and not guard_or_false(mask.shape[-1] == 1) and not guard_or_false(mask.stride(-1) <= 1)
    return mask.contiguous() if apart else mask


def of_keys(t: Tensor | None) -> tuple:
    """The strides of the batch and the keys."""
    return (0, 0) if t is None else (0 if guard_or_false(t.shape[0] == 1) else t.stride(0), t.stride(-1))


def rows_of(t: Tensor) -> tuple:
    return t.stride()[:3]


def laid_out(t: Tensor) -> Tensor:
    """An empty tensor like t: heads last in memory where t has them so."""
    b, h, n, d = t.shape
    if guard_or_false(t.stride(1) < t.stride(2)):
        return torch.empty((b, n, h, d), dtype=t.dtype, device=t.device).transpose(1, 2)
    return torch.empty((b, h, n, d), dtype=t.dtype, device=t.device)


def forward_config(d: int, itemsize: int, dense: bool, few: bool = False) -> dict:
    """Queries and keys a block, warps and stages, by the head size, the bytes of a number, and whether a tile of the
    mask or the bias is read too; half the block for few queries."""
    if itemsize == 4:
        bm, bn, warps, stages = 32, 32, 8, 1
    elif d <= 64:  # swept on an H200, as the line for 128 without a dense mask
        bm, bn, warps, stages = 64 if dense else 128, 64, 4, 3
    elif d <= 128:
        bm, bn, warps, stages = (128, 64, 8, 2) if dense else (128, 128, 8, 3)
    else:
        bm, bn, warps, stages = 128, 32 if dense else 64, 8, 2
    if few and bm == 128:
        bm, bn, warps = 64, min(bn, 64 if d <= 128 else 32), 4
    return dict(BM=bm, BN=bn, num_warps=warps, num_stages=stages)


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
            seen_kernel, (q.shape[0],), keys, seen, k.shape[2], *of_keys(keys), PADDED=masking.padded,
            ALL="always" if not skips else "none seen" if fills else "never", BLOCK=1024, num_warps=4,
        )  # fmt: skip
    args = (
        bias, keep, keys, seen, q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1], low or 0, high or 0,
        *strides(bias), *strides(keep), *of_keys(keys),
    )  # fmt: skip
    d, base = number(q.shape[-1]), LOG2E if bias is None else 1.0
    constants = dict(
        SCALE=masking.scale, CAP=masking.cap, FILL=max(masking.fill * base, LOWEST) if fills else None,
        PADDED=masking.padded, LOW=low is not None, HIGH=high is not None, SKIPS=skips, D=d,
        BD=max(16, triton.next_power_of_2(d)), UPCAST=interpreted(flash_kernel),
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    )  # fmt: skip
    return args, constants


def forward(q, k, v, masking: Masking, save: bool, config: dict | None = None) -> tuple[Tensor, Tensor]:
    """The result, heads last in memory, and the logarithm of each row's sum `[b, h, n]`. Grid: blocks of queries."""
    b, h, n, d = q.shape
    dense = masking.bias is not None or masking.keep is not None
    config = config or forward_config(number(d), q.element_size(), dense, statically_known_true(n <= 64))
    out = torch.empty((b, n, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty((b, h, n) if save else (0,), dtype=torch.float32, device=q.device)
    args, constants = masks_of(q, k, masking)
    launch(
        flash_kernel, ((n + config["BM"] - 1) // config["BM"] * b * h,), q, k, v, out, lse if save else None, *args,
        *rows_of(q), *rows_of(k), *rows_of(v), *rows_of(out), NAN=masking.hidden == "nan", **constants, **config,
    )  # fmt: skip
    return out, lse


# Bytes: keys once.
@triton.jit
def seen_kernel(
    KEYS, SEEN, m, y0, y1, PADDED: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each batch the first key that is seen, the one after the last, and whether all between them are."""
    batch = tl.program_id(0)
    KEYS += batch.to(tl.int64) * y0
    first = tl.full([BLOCK], 2147483647, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, m, BLOCK):
        j = start + tl.arange(0, BLOCK)
        kept = (tl.load(KEYS + j.to(tl.int64) * y1, j < m, 0) != 0) != PADDED
        kept = kept & (j < m)
        first = tl.minimum(first, tl.where(kept, j, 2147483647))
        end = tl.maximum(end, tl.where(kept, j + 1, 0))
        count += kept.to(tl.int32)
    first, end, count = tl.min(first, 0), tl.max(end, 0), tl.sum(count, 0)
    whole = (count == end - first).to(tl.int32)
    if ALL == "always":
        first, end, whole = first * 0, end * 0 + m, tl.where(count == m, 1, 0)
    if ALL == "none seen":
        end = tl.where(count == 0, m, end)
        whole = tl.where(count == 0, 0, whole)
    first = tl.minimum(first, end)
    if ALL == "none seen":
        first = tl.where(count == 0, 0, first)
    at = SEEN + batch * 3
    tl.store(at, first)
    tl.store(at + 1, end)
    tl.store(at + 2, whole)


@triton.jit
def tile(P, at, stride, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of d `[rows, BD]`, 0 beyond d."""
    d = tl.arange(0, BD)[None, :]
    if D == BD:
        x = tl.load(P + at[:, None] * stride + d)
    else:
        x = tl.load(P + at[:, None] * stride + d, d < D, 0.0)
    return x.to(tl.float32) if UPCAST else x  # the interpreter multiplies bf16 wrongly


@triton.jit
def scores(s, BIAS, i, j, b2, b3, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Products as scores: scaled, capped, with their bias, which is read at i and j."""
    BASE: tl.constexpr = 1.4426950408889634 if BIAS is None else 1.0
    s = s * (SCALE * BASE) if CAP is None else capped(s, SCALE, CAP) * (CAP * BASE)
    if BIAS is not None:
        s += tl.load(BIAS + i * b2 + j * b3).to(tl.float32)
    return s


@triton.jit
def power(x, BIAS):
    """Of the base in which scores are."""
    return tl.exp2(x) if BIAS is None else tl.exp2(x * 1.4426950408889634)


@triton.jit
def capped(s, SCALE: tl.constexpr, CAP: tl.constexpr):
    """tanh(scale · s / cap)"""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * SCALE / CAP * 1.4426950408889634)))


@triton.jit
def keeps(
    KEEP, KEYS, i, j, apart, low, high, p2, p3, y1, PADDED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Which scores are seen, at i and j of the block; `apart`: i - j in the whole. Without MASKED only by KEEP."""
    kept = i + j >= 0
    if KEEP is not None:
        kept = kept & (tl.load(KEEP + i * p2 + j * p3) != 0)
    if MASKED:
        if KEYS is not None:
            kept = kept & ((tl.load(KEYS + j * y1) != 0) != PADDED)
        if LOW:
            kept = kept & (apart >= low)
        if HIGH:
            kept = kept & (apart <= high)
    return kept


@triton.jit
def masked(
    s, BIAS, KEEP, KEYS, row, col, i0, j0, n, m, low, high, b2, b3, p2, p3, y1, SCALE: tl.constexpr, CAP: tl.constexpr,
    FILL: tl.constexpr, PADDED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of the block at i0, j0, and which are seen. `row` and `col` are its places, in either order."""
    i = tl.minimum(row, n - 1 - i0)
    j = tl.minimum(col, m - 1 - j0) if MASKED else col
    if BIAS is not None:
        BIAS += tl.cast(i0, tl.int64) * b2 + tl.cast(j0, tl.int64) * b3
    s = scores(s, BIAS, i, j, b2, b3, SCALE, CAP)
    kept = i + j >= 0
    if MASKED or KEEP is not None:
        if KEEP is not None:
            KEEP += tl.cast(i0, tl.int64) * p2 + tl.cast(j0, tl.int64) * p3
        if KEYS is not None:
            KEYS += tl.cast(j0, tl.int64) * y1
        apart = i0 - j0 + row - col
        kept = keeps(KEEP, KEYS, i, j, apart, low, high, p2, p3, y1, PADDED, LOW, HIGH, MASKED)
        if FILL is not None:
            s = tl.where(kept, s, FILL)
            if MASKED:
                s = tl.where(col < m - j0, s, float("-inf"))
        else:
            if MASKED:
                kept = kept & (col < m - j0)
            s = tl.where(kept, s, float("-inf"))
    return s, kept


@triton.jit
def key_range(
    SEEN, batch, i0, n, m, low, high, LOW: tl.constexpr, HIGH: tl.constexpr, SKIPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """For queries i0, ... the keys from `left` to `end` count; from `begin` to `stop` in whole blocks all are seen."""
    left, end = i0 * 0, i0 * 0 + m
    begin, stop = left, end // BN * BN
    if SEEN is not None:
        first = tl.load(SEEN + batch * 3)
        end = tl.load(SEEN + batch * 3 + 1)
        left, begin = first // BN * BN, (first + BN - 1) // BN * BN
        stop = tl.where(tl.load(SEEN + batch * 3 + 2) != 0, end // BN * BN, 0)
    if LOW:
        stop = tl.minimum(stop, tl.maximum(i0 - low + 1, 0) // BN * BN)
        if SKIPS:
            end = tl.minimum(end, tl.maximum(tl.minimum(i0 + BM, n) - low, 0))
    if HIGH:
        begin = tl.maximum(begin, (tl.maximum(i0 + BM - 1 - high, 0) + BN - 1) // BN * BN)
        if SKIPS:
            left = tl.maximum(left, tl.maximum(i0 - high, 0) // BN * BN)
    end = tl.maximum(end, left)
    begin = tl.minimum(tl.maximum(begin, left), (end + BN - 1) // BN * BN)
    return left, begin, tl.maximum(stop, begin), end


# Operations: 4 b h n m d, of those keys that are seen. Bytes: q, k, v, out and the masks once.
@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE, BIAS, KEEP, KEYS, SEEN, n, m, heads, group, low, high, b0, b1, b2, b3, p0, p1, p2, p3, y0, y1,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, NAN: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    FILL: tl.constexpr, PADDED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SKIPS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BM)
    i0 = tl.program_id(0) % blocks
    i0 = (blocks - 1 - i0 if LOW else i0) * BM  # the longest rows first
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    inside = tl.minimum(row, n - 1 - i0)
    K += batch * k0 + head // group * k1
    V += batch * v0 + head // group * v1
    if BIAS is not None:
        BIAS += batch * b0 + head * b1
    if KEEP is not None:
        KEEP += batch * p0 + head * p1
    if KEYS is not None:
        KEYS += batch * y0
    q = tile(Q + batch * q0 + head * q1 + tl.cast(i0, tl.int64) * q2, inside, q2, D, BD, UPCAST)
    acc = tl.zeros([BM, BD], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, LOW, HIGH, SKIPS, BM, BN)
    for start in tl.range(begin, stop, BN):
        acc, top, total = flash_step(
            acc, top, total, q, K, V, BIAS, KEEP, KEYS, row, col, i0, start, n, m, low, high, b2, b3, p2, p3, y1, k2,
            v2, SCALE, CAP, FILL, PADDED, LOW, HIGH, D, BD, UPCAST, PRECISION, False,
        )  # fmt: skip
    before = (begin - left) // BN
    for t in tl.range(0, before + tl.cdiv(tl.maximum(end - stop, 0), BN)):
        start = tl.where(t < before, left + t * BN, stop + (t - before) * BN)
        acc, top, total = flash_step(
            acc, top, total, q, K, V, BIAS, KEEP, KEYS, row, col, i0, start, n, m, low, high, b2, b3, p2, p3, y1, k2,
            v2, SCALE, CAP, FILL, PADDED, LOW, HIGH, D, BD, UPCAST, PRECISION, True,
        )  # fmt: skip
    lse = top + (tl.log2(total) if BIAS is None else tl.log(total))
    if not NAN:  # with nothing seen: a result of 0, and no gradient
        lse = tl.where(total == 0.0, float("inf"), lse)
        total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    d = tl.arange(0, BD)[None, :]
    OUT += batch * o0 + head * o1 + tl.cast(i0, tl.int64) * o2
    tl.store(OUT + row[:, None] * o2 + d, acc, (row[:, None] < n - i0) & (d < D))
    if LSE is not None:
        tl.store(LSE + (batch * heads + head) * n + i0 + row, lse, row < n - i0)


@triton.jit
def flash_step(
    acc, top, total, q, K, V, BIAS, KEEP, KEYS, row, col, i0, start, n, m, low, high, b2, b3, p2, p3, y1, k2, v2,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, PADDED: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with the keys of one block."""
    at = tl.minimum(col, m - 1 - start) if MASKED else col
    k = tile(K + tl.cast(start, tl.int64) * k2, at, k2, D, BD, UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED or BIAS is not None or KEEP is not None or CAP is not None:
        s, _ = masked(
            s, BIAS, KEEP, KEYS, row[:, None], col[None, :], i0, start, n, m, low, high, b2, b3, p2, p3, y1, SCALE, CAP,
            FILL, PADDED, LOW, HIGH, MASKED,
        )  # fmt: skip
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far
        p = power(s - shift[:, None], BIAS)
    else:
        new = tl.maximum(top, tl.max(s, 1) * (SCALE * 1.4426950408889634))
        shift = new
        p = tl.exp2(s * (SCALE * 1.4426950408889634) - shift[:, None])
    share = power(top - shift, BIAS)
    v = tile(V + tl.cast(start, tl.int64) * v2, at, v2, D, BD, UPCAST)
    acc = tl.dot(p.to(v.dtype), v, acc * share[:, None], input_precision=PRECISION)
    return acc, new, total * share + tl.sum(p, 1)
