"""Which tiles of the scores the attention kernels read: what a program begins with, and the blocks
that a band and the keys that are seen leave to it.

Blocks of which every score counts need no mask. They come first, from `begin` to `stop`; the
partial blocks, before and after them, from `left` to `begin` and from `stop` to `end`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_block(size, heads, BLOCK: tl.constexpr, last_first=None):
    """Of this program: where its block begins, its head and its batch.

    The blocks of eight heads alternate, so that the longest blocks of all eight come first: head by
    head, the long blocks of the last would begin when most multiprocessors are about to be idle.
    What eight heads read stays in the L2.
    """
    blocks, first = tl.cdiv(size, BLOCK), tl.program_id(0)
    first = first // (blocks * 8) * 8
    interleaved = tl.minimum(tl.num_programs(0) // blocks - first, 8)
    pid = tl.program_id(0) - first * blocks
    block = pid // interleaved
    block = block if last_first is None else blocks - 1 - block
    head = first + pid % interleaved
    return block * BLOCK, (head % heads).to(tl.int64), (head // heads).to(tl.int64)


@triton.jit
def key_range(
    SEEN, batch, i0, n, m, low, high, KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For the queries i0, ..., i0 + BM - 1: (left, begin, stop, end). The keys from left to end
    count; from begin to stop, in whole blocks of BN, all queries see all keys.
    """
    left, end = i0 * 0, i0 * 0 + m
    begin, stop = left, end // BN * BN
    if KEYS_ARE == "documents":
        left, begin, stop, end = document_range(SEEN, batch, i0, n, BM)
    elif SEEN is not None:
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
    SEEN, batch, j0, n, m, low, high, KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For the keys j0, ..., j0 + BN - 1: (left, begin, stop, end). The queries from left to end
    count; from begin to stop, in whole blocks of BM, all queries see all keys.
    """
    left, end = j0 * 0, j0 * 0 + n
    begin, stop = left, tl.where(j0 + BN <= m, end // BM * BM, 0)
    if KEYS_ARE == "documents":
        left, begin, stop, end = document_range(SEEN, batch, j0, m, BN)
    if low is not None:
        begin = tl.maximum(begin, (tl.maximum(j0 + BN - 1 + low, 0) + BM - 1) // BM * BM)
        if SKIPS:
            left = tl.maximum(left, tl.maximum(j0 + low, 0) // BM * BM)
            end = tl.where(j0 + low < n, end, 0)
    if high is not None:
        stop = tl.minimum(stop, tl.maximum(j0 + high + 1, 0) // BM * BM)
        if SKIPS:
            end = tl.minimum(end, tl.maximum(tl.minimum(j0 + BN, m) + high, 0))
    if SEEN is not None and KEYS_ARE != "documents":
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
def document_range(SEEN, batch, start, size, BLOCK: tl.constexpr):
    """What document_ranges found for the block of BLOCK places that begins at start."""
    at = SEEN + (batch * tl.cdiv(size, BLOCK) + start // BLOCK) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def partial_block(t, left, begin, stop, BLOCK: tl.constexpr):
    """Where partial block t begins: those before the whole blocks come first, then those after."""
    before = (begin - left) // BLOCK
    return tl.where(t < before, left + t * BLOCK, stop + (t - before) * BLOCK)


@triton.jit
def partial_blocks(left, begin, stop, end, BLOCK: tl.constexpr):
    """How many blocks are partial."""
    return (begin - left) // BLOCK + tl.cdiv(tl.maximum(end - stop, 0), BLOCK)
