"""Dropout whose mask is a function of a seed and of the position: x · 0 or x / (1 - p).

Philox (Salmon et al. 2011) with ten rounds turns the seed and a counter into four words of 32 bits.
The counter is row · ceil(n / 4) + column // 4 in 64 bits, the word column % 4; an element is
dropped where its word is less than p · 2**32. So a mask need not be kept: forward and backward
make the same, whatever their blocks are. It is not the mask that torch or Inductor makes of that
seed.

In a matrix that is made tile by tile, as the scores of attention are, the four elements of one
counter are eight rows and eight columns apart: wgmma leaves those in one thread, also of the
transposed matrix, so that no word is exchanged. There seven rounds are made.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = tl.constexpr(10)  # the published number
# the fewest that pass the paper's tests: where products are as fast, these take longer
TILE_ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """The seed, an int64 tensor of one number, and the share of elements that are dropped."""

    seed: Tensor
    p: float


def threshold(p: float) -> int:
    """The THRESHOLD of `dropout_factors` for a share p of dropped elements: random words below it
    are dropped.
    """
    return min(round(p * 2**32), WORD)


def scale(p: float) -> float:
    """The SCALE of `dropout_factors`, what survivors are multiplied with: 1 / (1 - p), or 0 where
    p is 1.
    """
    return 1 / (1 - p) if p < 1 else 0.0


def dropout_arguments(dropout: Dropout | None) -> tuple[Tensor | None, dict]:
    """What a kernel that may have dropout in it takes for it: the seed, and two constants."""
    if dropout is None:
        return None, dict(THRESHOLD=0, SCALE=1.0)
    return dropout.seed, dict(THRESHOLD=threshold(dropout.p), SCALE=scale(dropout.p))


@triton.jit
def dropout_factors(seed, counter, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """In a kernel: 0 or SCALE for each of `[..., 4 k]` elements, from `[..., k]` counters."""
    return tl.where(survivors(seed, counter, THRESHOLD), SCALE, 0.0)


@triton.jit
def random_words(seed, counter):
    """The four words of each counter, one for each of four elements, as int32."""
    return tl.randint4x(seed, counter, ROUNDS)


@triton.jit
def survivors(seed, counter, THRESHOLD: tl.constexpr):
    """Which of `[..., 4 k]` elements survive, from `[..., k]` counters."""
    a, b, c, d = random_words(seed, counter)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.uint32, bitcast=True)
    return words >= THRESHOLD


@triton.jit
def tile_survives(
    seed, row, col, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which elements of the tile `[ROWS, COLUMNS]`, or TRANSPOSED `[COLUMNS, ROWS]`, survive.

    row and col are half the indices of its first element, which are multiples of 16.
    """
    rows, cols = row + tl.arange(0, ROWS // 2), col + tl.arange(0, COLUMNS // 2)
    if TRANSPOSED:
        a, c, b, d = tl.philox(seed, cols[:, None], rows[None, :], 0, 0, TILE_ROUNDS)
        M: tl.constexpr = COLUMNS
        N: tl.constexpr = ROWS
    else:
        a, b, c, d = tl.philox(seed, cols[None, :], rows[:, None], 0, 0, TILE_ROUNDS)
        M: tl.constexpr = ROWS
        N: tl.constexpr = COLUMNS
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [M // 16, 8, N // 16, 8, 2, 2])
    return tl.reshape(tl.permute(words, (0, 5, 1, 2, 4, 3)), [M, N]) >= THRESHOLD


def tiles_kept(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """The same in plain torch for `[..., n, m]`. Each of the n-by-m matrices has ceil(n / 16) · 8
    rows of counters.
    """
    *outer, n, m = shape
    down, across = (n + 15) // 16, (m + 15) // 16
    rows = torch.arange(math.prod(outer) * down * 8, device=seed.device)
    counter = (rows[:, None] << 32) + torch.arange(across * 8, device=seed.device)
    words = torch.cat([word.reshape(-1) for word in philox(seed, counter, TILE_ROUNDS.value)])
    matrix, i, j = (torch.arange(k, device=seed.device) for k in (math.prod(outer), n, m))
    row = (matrix.view(outer)[..., None] * down + i // 16) * 8 + i % 8
    word = i[:, None] % 16 // 8 * 2 + j % 16 // 8  # which of the four
    index = row[..., None] * (across * 8) + j // 16 * 8 + j % 8 + word * counter.numel()
    return words[index] >= threshold(p)


def dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Dropout of x `[..., n]` in plain torch, with the mask that kernels make of this seed.

    Computed in fp32, or in fp64 for fp64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * kept(seed, x.shape, p) * scale(p)).to(x.dtype)


def kept(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Which elements survive."""
    n = shape[-1]
    rows, quads = math.prod(shape[:-1]), (n + 3) // 4
    # Of dynamic sizes nothing may be asked: a reshape would ask what divides n, one counter whether
    # it is the only one.
    count = rows * quads + 1
    words = torch.cat(philox(seed, torch.arange(count, device=seed.device)))
    row, col = (
        torch.arange(rows, device=seed.device).view(shape[:-1]),
        torch.arange(n, device=seed.device),
    )
    index = row[..., None] * quads + col // 4 + col % 4 * count
    return words[index] >= threshold(p)


def philox(seed: Tensor, counter: Tensor, rounds: int = ROUNDS.value) -> list[Tensor]:
    """The four words of each counter, as int64."""
    c0, c1, c2, c3 = (
        counter & WORD,
        counter >> 32,
        torch.zeros_like(counter),
        torch.zeros_like(counter),
    )
    k0, k1 = seed & WORD, seed >> 32
    for _ in range(rounds):
        high, low = times(c2, 0xCD9E8D57), times(c0, 0xD2511F53)
        c0, c1, c2, c3 = high[0] ^ c1 ^ k0, high[1], low[0] ^ c3 ^ k1, low[1]
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def times(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of a product. Its sign bit may be set: the upper word is right
    all the same.
    """
    product = a * b
    return (product >> 32) & WORD, product & WORD
