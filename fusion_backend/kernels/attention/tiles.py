"""What the flash attention kernels do with a tile of scores, and which tiles they read.

A tile is at the queries i0, ... and the keys j0, ...; `row` and `col` count from there, and stand
in either order: the gradients of k and v have their scores transposed. `masks` is a tuple of what a
kernel knows of the scores of one head: the masks and the number of the seed, None where they are
missing; batch and head; heads, n and m; the band; strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.dropout import tile_survives


@triton.jit
def place(size, heads, BLOCK: tl.constexpr, last_first=None):
    """Of this program: where its block begins, its head and its batch.

    Eight heads take turns, so that the longest blocks of all eight come first: head by head, the
    long blocks of the last would begin when most multiprocessors are about to be idle. What eight
    heads read stays in the L2.
    """
    blocks, first = tl.cdiv(size, BLOCK), tl.program_id(0)
    first = first // (blocks * 8) * 8
    turns = tl.minimum(tl.num_programs(0) // blocks - first, 8)
    pid = tl.program_id(0) - first * blocks
    block = pid // turns
    block = block if last_first is None else blocks - 1 - block
    head = first + pid % turns
    return block * BLOCK, (head % heads).to(tl.int64), (head // heads).to(tl.int64)


@triton.jit
def begins(P, batch, head, start, s0, s1, s2):
    """Where row `start` of a head is."""
    return P + batch * s0 + head * s1 + tl.cast(start, tl.int64) * s2


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
def masked(
    s, masks, row, col, i0, j0, SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Products as scores, and which are seen. Without MASKED a dense choice alone decides that."""
    (
        BIAS,
        KEEP,
        KEYS,
        SEED,
        batch,
        head,
        heads,
        n,
        m,
        low,
        high,
        b0,
        b1,
        b2,
        b3,
        p0,
        p1,
        p2,
        p3,
        y0,
        y1,
    ) = masks
    i = tl.minimum(row, n - 1 - i0)
    j = tl.minimum(col, m - 1 - j0) if MASKED else col
    if BIAS is not None:
        BIAS = begins(BIAS, batch, head, i0, b0, b1, b2) + tl.cast(j0, tl.int64) * b3
    s = scores(s, BIAS, i, j, b2, b3, SCALE, CAP)
    kept = row + col >= 0
    if KEEP is not None:
        KEEP = begins(KEEP, batch, head, i0, p0, p1, p2) + tl.cast(j0, tl.int64) * p3
        kept = tl.load(KEEP + i * p2 + j * p3) != 0
    if MASKED:
        if KEYS is not None:
            KEYS += batch * y0 + tl.cast(j0, tl.int64) * y1
            kept = kept & ((tl.load(KEYS + j * y1) != 0) != PADDED)
        # One comparison a score: its key with the last key that its query sees.
        if low is not None:
            last = row + (i0 - j0 - low)
            kept = kept & (col <= (last if FILL is not None else tl.minimum(last, m - 1 - j0)))
        elif FILL is None:
            kept = kept & (col < m - j0)
        if high is not None:
            kept = kept & (col >= row + (i0 - j0 - high))
    if MASKED or KEEP is not None:
        s = tl.where(kept, s, float("-inf") if FILL is None else FILL)
        if MASKED and FILL is not None:
            s = tl.where(col < m - j0, s, float("-inf"))
    return s, kept


@triton.jit
def survive(
    masks, i0, j0, BM: tl.constexpr, BN: tl.constexpr, THRESHOLD: tl.constexpr, TURNED: tl.constexpr
):
    """Which probabilities of a tile dropout leaves."""
    (
        BIAS,
        KEEP,
        KEYS,
        SEED,
        batch,
        head,
        heads,
        n,
        m,
        low,
        high,
        b0,
        b1,
        b2,
        b3,
        p0,
        p1,
        p2,
        p3,
        y0,
        y1,
    ) = masks
    row = (batch * heads + head).to(tl.int32) * (tl.cdiv(n, 16) * 8) + i0 // 2
    return tile_survives(SEED, row, j0 // 2, BM, BN, THRESHOLD, TURNED)


# Bytes: keys once.
@triton.jit
def seen_kernel(
    KEYS, SEEN, m, y0, y1, PADDED: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each batch the first key that is seen, the one after the last, and whether all between
    them are.
    """
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
def key_range(
    SEEN, batch, i0, n, m, low, high, SKIPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """For queries i0, ... the keys from `left` to `end` count; from `begin` to `stop` in whole
    blocks all are seen.
    """
    left, end = i0 * 0, i0 * 0 + m
    begin, stop = left, end // BN * BN
    if SEEN is not None:
        first = tl.load(SEEN + batch * 3)
        end = tl.load(SEEN + batch * 3 + 1)
        left, begin = first // BN * BN, (first + BN - 1) // BN * BN
        stop = tl.where(tl.load(SEEN + batch * 3 + 2) != 0, end // BN * BN, 0)
    if low is not None:
        stop = tl.minimum(stop, tl.maximum(i0 - low + 1, 0) // BN * BN)
        if SKIPS:
            end = tl.minimum(end, tl.maximum(tl.minimum(i0 + BM, n) - low, 0))
    if high is not None:
        begin = tl.maximum(begin, (tl.maximum(i0 + BM - 1 - high, 0) + BN - 1) // BN * BN)
        if SKIPS:
            left = tl.maximum(left, tl.maximum(i0 - high, 0) // BN * BN)
    end = tl.maximum(end, left)
    begin = tl.minimum(tl.maximum(begin, left), (end + BN - 1) // BN * BN)
    return left, begin, tl.maximum(stop, begin), end


@triton.jit
def query_range(
    SEEN, batch, j0, n, m, low, high, SKIPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """For keys j0, ... the queries from `left` to `end` count; from `begin` to `stop` in whole
    blocks all see them.
    """
    left, end = j0 * 0, j0 * 0 + n
    begin, stop = left, tl.where(j0 + BN <= m, end // BM * BM, 0)
    if low is not None:
        begin = tl.maximum(begin, (tl.maximum(j0 + BN - 1 + low, 0) + BM - 1) // BM * BM)
        if SKIPS:
            left = tl.maximum(left, tl.maximum(j0 + low, 0) // BM * BM)
            end = tl.where(j0 + low < n, end, 0)
    if high is not None:
        stop = tl.minimum(stop, tl.maximum(j0 + high + 1, 0) // BM * BM)
        if SKIPS:
            end = tl.minimum(end, tl.maximum(tl.minimum(j0 + BN, m) + high, 0))
    if SEEN is not None:
        first, last = tl.load(SEEN + batch * 3), tl.load(SEEN + batch * 3 + 1)
        whole = (
            (tl.load(SEEN + batch * 3 + 2) != 0) & (j0 >= first) & (tl.minimum(j0 + BN, m) <= last)
        )
        stop = tl.where(whole, stop, 0)
        end = tl.where((j0 < last) & (j0 + BN > first), end, 0)
    end = tl.maximum(end, left)
    last = (end + BM - 1) // BM * BM
    begin = tl.minimum(tl.maximum(begin, left), last)
    return left, begin, tl.maximum(tl.minimum(stop, last), begin), end


@triton.jit
def edge(t, left, begin, stop, BLOCK: tl.constexpr):
    """Where edge block t begins: those before the whole blocks come first, then those behind."""
    before = (begin - left) // BLOCK
    return tl.where(t < before, left + t * BLOCK, stop + (t - before) * BLOCK)


@triton.jit
def edges(left, begin, stop, end, BLOCK: tl.constexpr):
    """How many blocks are not whole."""
    return (begin - left) // BLOCK + tl.cdiv(tl.maximum(end - stop, 0), BLOCK)
