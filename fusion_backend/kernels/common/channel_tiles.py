"""Tiles of channels-first tensors `[n, c, ...]`, dense, for kernels that take all channels of a
position together.

Whoever reads the channels of one position jumps through memory, and reads neighbours of it in every
cache line. A program therefore takes all channels of BLOCK positions, which are adjacent in memory,
and holds them: each element is read once. Positions are counted through all samples, so that a tile
may begin in one sample and end in another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import dense, dynamic, memory, number
from fusion_backend.reporting.reject import Reject, Settled

MAX_CHANNELS = 1024  # of which a program can hold 16 positions
MAX_SAMPLE = 1 << 30  # elements of a sample; a tile counts through two of them in 32 bits


class Tile(NamedTuple):
    """What a program holds: the power of two from the channels on, and positions; its warps."""

    channels: int
    positions: int
    warps: int
    programs: int = 0  # a multiprocessor, which walk through the tiles; 0: all tiles at once
    stages: int = 0  # of the loop over tiles


def reject_channels_first(**tensor: Tensor) -> Reject | None:
    """Refuse tensors that are not dense in the order of their dimensions, and channels or planes
    that the kernel cannot be compiled for, or not hold.
    """
    ((name, x),) = tensor.items()
    if x.dim() < 3:
        return Reject(
            f"{name} has {x.dim()} dimensions: channels of a matrix are the columns of rows"
        )
    if any(map(dynamic, x.shape[1:])):
        return Reject("the number of channels or the size of a plane is dynamic")
    c = number(x.shape[1])
    if not 1 <= c <= MAX_CHANNELS:
        return Reject(f"{c} channels are not between 1 and {MAX_CHANNELS}, which a program holds")
    if c * planes(x) > MAX_SAMPLE:
        return Reject(f"a sample of {c * planes(x)} elements is larger than {MAX_SAMPLE}")
    if not dense(x, range(x.dim())):
        rows = statically_known_true(x.stride(1) == 1)
        why = "channels-last in memory, where the channels are rows" if rows else "not dense"
        return Reject(f"{name} is {why}: {memory(x)}")


def rows_there(convolution: str) -> Settled:
    """The region that the gate would measure has the layout of the graph. In simple_gates of
    benchmarks.foreign a norm won there, and the whole graph lost by it.
    """
    return Settled(f"Inductor computes {convolution} channels-last, where the channels are rows")


def planes(x: Tensor) -> int:
    """Positions of a sample."""
    return math.prod(map(number, x.shape[2:]))


def tiles_of(x: Tensor, positions: int):
    """How many tiles of so many positions there are, counted through all samples."""
    return (x.shape[0] * planes(x) + positions - 1) // positions


@triton.jit
def tile(
    t, samples, C: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of tile number t: its channels, where its first sample begins, where its elements are from
    there, `[CHANNELS, BLOCK]`, and which of them exist.
    """
    ch = tl.arange(0, CHANNELS)
    first, across, there = positions(t, samples, C, INNER, BLOCK)
    at = ch[:, None] * INNER + across[None, :]
    return ch, first, at, (ch < C)[:, None] & there[None, :]


@triton.jit
def positions(t, samples, C: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Of the positions of tile number t: where the first sample begins, where their first channels
    are from there, and which of them exist.
    """
    start = tl.cast(t, tl.int64) * BLOCK
    sample = start // INNER
    lane = tl.arange(0, BLOCK)
    position = (start - sample * INNER).to(tl.int32) + lane
    across = position // INNER * (C * INNER) + position % INNER
    there = lane < tl.cast(samples, tl.int64) * INNER - start
    return sample * (C * INNER), across, there
