"""The tiles in which a matrix product is computed: which there are, and which to take.

The tables in kernels/common/tuned.py have the fastest of the sizes that were measured. For others
tiles with finishers are taken under the conditions in which they were not slower, or else a model
of the cost chooses: the tiles of a multiprocessor, one after the other, their products at the speed
of the tensor cores, and what comes before and after the products, unless another program on the
same multiprocessor multiplies meanwhile. Short products have no tiles with finishers (LAUNCH). The
gradients of a hidden layer take the tiles that were measured for the forward.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import dynamic
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.kernels.common.tuned import PRODUCTS, WITHOUT_FINISHERS

# Of an H200. Measured: bf16 products of 8192 x 8192 x 8192, and a copy.
PRODUCTS_A_SECOND = 700e12
BYTES_A_SECOND = 4.3e12
LATENCY = 1e-6  # seconds from the first request of a tile to its first product
MANY = 1 << 14  # rows that are assumed where their number is not known
USUAL = {1: "gelu", 2: "silu"}  # the activation whose tile others take, by the number of weights
FEWEST = 2048  # rows from which on the table counts
DEEP, FULL = 512, 0.7  # the least K, and the least share of full waves, of tiles with finishers
# The fewest seconds of products for which they are taken. Their operators are opaque, and take the
# host longer than Inductor's launches: with 40e-6, calls of graphs with a single one waited for it
# (call_ratio in benchmarks/results/h200-foreign-products.json). That was before generated code
# called their functions directly.
LAUNCH = 70e-6
SHARED = 227 * 1024  # bytes of shared memory a program may have, where no GPU is asked


class Tile(NamedTuple):
    """bm rows and bn columns of the result, bk of what is summed at a time."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    programs: int  # on a multiprocessor
    pieces: int  # in which the result is stored
    group: int = 8  # tiles down before one to the right
    finishers: int = 0  # warps of their own for what follows the product (specialised.py)

    @property
    def constants(self) -> dict[str, int]:
        """As the kernels without finishers take them."""
        return dict(
            BM=self.bm, BN=self.bn, BK=self.bk, GROUP=self.group, PIECES=self.pieces,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip

    def shared(self, weights: int, itemsize: int) -> int:
        """Bytes of shared memory: the operands of all stages, and what is stored at a time."""
        stage = (self.bm + weights * self.bn) * self.bk * itemsize
        return self.stages * stage + self.bm * self.bn // self.pieces * itemsize

    def number(self, m, n: int):
        """How many tiles a result `[m, n]` has."""
        return (m + self.bm - 1) // self.bm * -(-n // self.bn)


# For 16-bit elements, with one weight and with two.
SINGLE = [
    Tile(128, 256, 64, 8, 3, 1, 2),
    Tile(256, 128, 64, 8, 3, 1, 2),
    Tile(128, 128, 64, 4, 3, 2, 2),
    Tile(128, 128, 64, 8, 4, 1, 1),
    Tile(128, 64, 64, 4, 4, 2, 1),
    Tile(64, 128, 64, 4, 4, 2, 1),
    Tile(64, 64, 64, 4, 4, 3, 1),
]
DOUBLE = [
    Tile(128, 128, 64, 8, 3, 1, 2),
    Tile(128, 64, 64, 4, 3, 2, 1),
    Tile(64, 128, 64, 4, 2, 2, 2),
    Tile(64, 64, 64, 4, 4, 2, 1),
    Tile(64, 32, 64, 4, 4, 3, 1),
]
# With finishers, by the number of weights. They were at most 1 % slower than the others, and up to
# 35 % faster, wherever K was at least DEEP, each multiprocessor had a tile, and the waves of tiles
# were FULL (benchmarks/results/h100-sweep-specialised.json).
SPECIALISED = {
    1: Tile(128, 256, 64, 8, 3, 1, 1, finishers=4),
    2: Tile(128, 128, 64, 8, 3, 1, 1, finishers=4),
}
# Of int8, whose elements are half as large, and whose weights are never two.
NARROW = [
    Tile(128, 256, 128, 8, 3, 1, 2),
    Tile(128, 128, 128, 4, 3, 2, 2),
    Tile(128, 128, 128, 8, 4, 1, 1),
    Tile(128, 64, 128, 4, 4, 2, 1),
    Tile(64, 64, 128, 4, 4, 3, 1),
]
# Of fp32, whose elements are twice as large.
WIDE = [Tile(128, 64, 32, 8, 3, 1, 1), Tile(64, 64, 32, 4, 3, 2, 1), Tile(64, 32, 32, 4, 3, 2, 1)]


def candidates(weights: int, itemsize: int) -> list[Tile]:
    """The tiles worth timing."""
    if itemsize != 2:
        return WIDE if itemsize == 4 else NARROW
    return SINGLE if weights == 1 else DOUBLE


def seconds(
    tile: Tile, m: int, k: int, n: int, weights: int, itemsize: int, processors: int
) -> float:
    """The time that the model gives for a product of `[m, k]` with weights `[k, n]`."""
    down, across, steps = -(-m // tile.bm), -(-n // tile.bn), -(-k // tile.bk)
    # smaller tiles read more of their operands for each product
    speed = PRODUCTS_A_SECOND / 132 / (1 + 16 / tile.bm + 16 / (tile.bn * weights))
    speed *= 2 / itemsize
    multiplying = 2 * tile.bm * tile.bn * weights * steps * tile.bk / speed
    around = LATENCY + tile.bm * tile.bn * itemsize / (BYTES_A_SECOND / 132)
    each = max(tile.programs * multiplying, multiplying + around)
    waves = -(-down * across // (processors * tile.programs))
    moved = (m * k + weights * k * n + m * n) * itemsize
    return max(waves * each, moved / BYTES_A_SECOND)


def tile_for(
    x: Tensor, m, k: int, n: int, weights: int = 1, act: str = "gelu", specialised: bool = False
) -> Tile:
    """The tile to take for `[m, k]`, in the dtype of x, times `weights` weights `[k, n]`.
    specialised: may it have finishers?
    """
    rows = MANY if dynamic(m) else max(int(m), 1)
    size = x.element_size()
    specialised &= 2 * rows * k * n * weights >= LAUNCH * PRODUCTS_A_SECOND
    known = measured(weights, k, n, act, specialised)
    known = known or measured(weights, k, n, USUAL[weights], specialised)
    if rows >= FEWEST and size == 2 and known:
        return Tile(*known)
    room, processors = shared_memory(x.device), multiprocessors(x.device)
    if specialised and k >= DEEP and fills(SPECIALISED[weights].number(rows, n), processors):
        return SPECIALISED[weights]
    # where all of them are too large, Triton says so, and the site is left to Inductor
    fits = [t for t in candidates(weights, size) if t.shared(weights, size) <= room]
    fits = fits or candidates(weights, size)[-1:]
    return min(fits, key=lambda t: seconds(t, rows, k, n, weights, size, processors))


def fills(tiles: int, processors: int) -> bool:
    """Has each multiprocessor a tile, and are not too many idle in the last wave?"""
    return tiles >= processors and tiles >= FULL * processors * -(-tiles // processors)


def are_many(x: Tensor) -> bool:
    """Has x, in 16 bits, as many rows as what was timed, and is that known?"""
    rows = math.prod(x.shape[:-1])
    return x.element_size() == 2 and statically_known_true(rows >= FEWEST)


def measured(
    weights: int, k: int, n: int, act: str, specialised: bool = False
) -> tuple[int, ...] | None:
    """What was fastest for many rows, with finishers or without: the fields of a tile, () for the
    library, None if unknown.
    """
    key = f"{'linear' if weights == 1 else 'gated'} {act} {k}x{n}"
    return (PRODUCTS if specialised else WITHOUT_FINISHERS).get(key)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on the GPU that decisions are made for."""
    target = TARGET.get()
    if target is not None:
        return target.shared
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return SHARED


def programs(tile: Tile, m, n: int, device: torch.device):
    """How many programs are launched: they walk through the tiles."""
    most = tile.programs * multiprocessors(device)
    return most if dynamic(m) else min(most, tile.number(m, n))
