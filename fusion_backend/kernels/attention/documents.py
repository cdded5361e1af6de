"""Documents in one sequence: each place has the number of its document, and a query sees the keys
of its own. Which blocks of keys meet a block of queries is found before attention is computed.

The numbers of a block lie between its least and its largest one. Two blocks whose intervals are
apart have no document in common; two with one and the same number are wholly of one document. The
numbers need not be sorted: then more blocks are read, and masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.attention.masking import MaskArguments
from fusion_backend.kernels.common.launch import launch


def with_documents(
    masks: MaskArguments, batches, keys_are: str, block: int, other: int
) -> MaskArguments:
    """The same masks, and if keys are documents the ranges of blocks that a kernel reads."""
    if keys_are != "documents":
        return masks
    return masks._replace(seen=document_ranges(masks, batches, block, other))


def document_ranges(masks: MaskArguments, batches, block: int, other: int) -> Tensor:
    """`[b, blocks, 4]` int32: left, begin, stop, end for each block of `block` places, as key_range
    in ranges.py has them before it looks at the band. They say which blocks of `other` places meet
    it, and which of those are wholly of its document. The relation is symmetric: either may be
    queries, the other one keys, of which there are as many. Grid: blocks.
    """
    n = masks.keys_count
    blocks = (n + block - 1) // block
    ranges = torch.empty((batches, blocks, 4), dtype=torch.int32, device=masks.keys.device)
    launch(
        document_ranges_kernel, (batches * blocks,), masks.keys, ranges, n, *masks.keys_strides,
        BLOCK=block, OTHER=other, STEP=max(1, 2048 // other), num_warps=4,
    )  # fmt: skip
    return ranges


# Bytes: the numbers of a batch once a block, from L2.
@triton.jit
def document_ranges_kernel(
    NUMBERS, RANGES, n, numbers_batch, numbers_col,
    BLOCK: tl.constexpr, OTHER: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BLOCK)
    NUMBERS += (tl.program_id(0) // blocks).to(tl.int64) * numbers_batch
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(NUMBERS + tl.minimum(i, n - 1).to(tl.int64) * numbers_col)
    least, largest = tl.min(mine, 0), tl.max(mine, 0)
    one = least == largest
    # starts of the first and of the last block that meets it, and that is of one document with it
    first = tl.full([STEP], 2147483647, tl.int32)
    last = tl.zeros([STEP], tl.int32)
    first_whole = tl.full([STEP], 2147483647, tl.int32)
    last_whole = tl.zeros([STEP], tl.int32)
    wholes = tl.zeros([STEP], tl.int32)
    for start in tl.range(0, n, STEP * OTHER):
        at = start + tl.arange(0, STEP) * OTHER
        j = tl.minimum(at[:, None] + tl.arange(0, OTHER)[None, :], n - 1)
        other = tl.load(NUMBERS + j.to(tl.int64) * numbers_col)
        low, high = tl.min(other, 1), tl.max(other, 1)
        meets = (at < n) & (low <= largest) & (high >= least)
        whole = meets & one & (low == high) & (at + OTHER <= n)
        first = tl.minimum(first, tl.where(meets, at, 2147483647))
        last = tl.maximum(last, tl.where(meets, at, 0))
        first_whole = tl.minimum(first_whole, tl.where(whole, at, 2147483647))
        last_whole = tl.maximum(last_whole, tl.where(whole, at, 0))
        wholes += whole.to(tl.int32)
    left, end = tl.min(first, 0), tl.minimum(tl.max(last, 0) + OTHER, n)
    begin, stop, count = tl.min(first_whole, 0), tl.max(last_whole, 0) + OTHER, tl.sum(wholes, 0)
    together = (count > 0) & (stop - begin == count * OTHER)
    begin, stop = tl.where(together, begin, left), tl.where(together, stop, left)
    RANGES += tl.program_id(0) * 4
    tl.store(RANGES, left)
    tl.store(RANGES + 1, begin)
    tl.store(RANGES + 2, stop)
    tl.store(RANGES + 3, end)
