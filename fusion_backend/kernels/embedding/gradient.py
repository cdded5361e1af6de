"""The gradient of the weight of an embedding: for each row of the weight, the sum of the gradients
of the tokens that selected it.

Each row is written once, rows that no token selected as zeros. The tokens are sorted by their row
first, so that the tokens of a row are adjacent. A row of more tokens than a chunk has is added up
in two steps, so that one frequent token does not determine the running time. Sums are in fp32, in
an order that depends on the tokens alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch

CHUNK = 64  # tokens
COLUMNS, TOKENS = 2048, 4  # that a program adds up in one step


def gradient(d: Tensor, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The gradient of the weight, `[v, n]`, in its dtype.

    d is `[..., n]`; ids `[...]`, int64 or int32, in [-v, v): Inductor counts ids below 0 from the
    end, and asserts that there are no others. The row `padding` gets zeros; there is
    none with -1. Grid: rows, columns.
    """
    v, n = map(number, weight.shape)
    block = min(COLUMNS, triton.next_power_of_2(n))
    ids = ids.reshape(-1).int()  # 32 bits are sorted faster
    narrow, order = torch.sort(torch.where(ids < 0, ids + v, ids), stable=True)
    ids, count = narrow.long(), ids.numel()
    d = d.reshape(-1, n).contiguous()
    # where each row's tokens begin; those of the row after the last begin at the end
    starts = torch.searchsorted(ids, torch.arange(v + 1, device=ids.device))
    chunks = (count + CHUNK - 1) // CHUNK
    sums = torch.empty(chunks, 2, n, dtype=torch.float32, device=d.device)
    out = torch.empty(v, n, dtype=weight.dtype, device=d.device)
    options = dict(N=n, BLOCK=block, TOKENS=TOKENS, CHUNK=CHUNK, num_warps=4)
    across = triton.cdiv(n, block)
    launch(chunk_sums_kernel, (chunks, across), d, ids, order, starts, sums, count, **options)
    launch(
        embedding_gradient_kernel, (v, across), d, order, starts, sums, out,
        PADDING=padding, **options,
    )  # fmt: skip
    return out


@triton.jit
def sum_of_tokens(
    D, ORDER, first, end, col, N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """The gradients of the tokens at [first, end) of the sorted ones."""
    sum = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(first, end, TOKENS):
        place = start + tl.arange(0, TOKENS)
        row = tl.load(ORDER + place, place < end, 0)
        mask = (place < end)[:, None] & (col < N)[None, :]
        sum += tl.sum(tl.load(D + row[:, None] * N + col[None, :], mask, 0.0).to(tl.float32), 0)
    return sum


# Bytes: the tokens' gradients of such rows once, and their sums.
@triton.jit
def chunk_sums_kernel(
    D, IDS, ORDER, STARTS, SUMS, count,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For the first and the last row of a chunk, if they have more tokens than a chunk: the sum of
    their tokens in it. Any other row lies within the chunk.
    """
    chunk = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk.to(tl.int64) * CHUNK
    end = tl.minimum(begin + CHUNK, count)
    row, last = tl.load(IDS + begin), tl.load(IDS + end - 1)
    row_start, row_end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    SUMS += chunk.to(tl.int64) * 2 * N
    if row_end - row_start > CHUNK:
        sum = sum_of_tokens(D, ORDER, begin, tl.minimum(row_end, end), col, N, BLOCK, TOKENS)
        tl.store(SUMS + col, sum, col < N)
    if last != row:
        last_start, last_end = tl.load(STARTS + last), tl.load(STARTS + last + 1)
        if last_end - last_start > CHUNK:
            sum = sum_of_tokens(D, ORDER, last_start, end, col, N, BLOCK, TOKENS)
            tl.store(SUMS + N + col, sum, col < N)


# Bytes: the gradients of the other rows' tokens once, the sums once, the weight's gradient once.
@triton.jit
def embedding_gradient_kernel(
    D, ORDER, STARTS, SUMS, OUT, PADDING: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    if row == PADDING:
        end = first
    if end - first <= CHUNK:
        sum = sum_of_tokens(D, ORDER, first, end, col, N, BLOCK, TOKENS)
    else:
        sum = tl.zeros([BLOCK], tl.float32)
        for chunk in tl.range(first // CHUNK, (end + CHUNK - 1) // CHUNK):
            # the last row of the first chunk, and the first one of the others
            place = chunk * 2 + tl.where(chunk * CHUNK < first, 1, 0)
            sum += tl.load(SUMS + place * N + col, col < N, 0.0)
    tl.store(OUT + row * N + col, sum, col < N)
