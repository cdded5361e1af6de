"""Rows that programs share, because one cannot hold a row and what it sums up while it reads the
next.

A group of programs walks through rows, a piece of each row to a program. Of its piece a program
tells the others two numbers, waits for theirs, and writes its piece of the result, while the next
rows are on the way to shared memory.

That nobody waits for ever: a program's group and piece follow from when it starts, by a counter,
not from its number. So all groups that have started are complete but for the last, and when they
have finished, the last has the room to become so: room for as many programs as a row has pieces is
enough, and one on every multiprocessor is asked for. (Of several such kernels at the same time,
each may have a last group that waits: room for that many times as many.) And what a program tells
it has told before it listens, because its listening depends on what the exchange returned. Triton's
interpreter runs one program after another, so there none may wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.compat.torch import hinted
from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.kernels.common.launch import interpreted
from fusion_backend.kernels.common.rows import FEW, Config, multiprocessors

LANES = tl.constexpr(32)  # the most pieces a row can have: one a thread of a warp
NOTHING = tl.constexpr(-1)  # what stands where nothing was told


def shareable(x: Tensor, config: Config) -> bool:
    """Do programs run at the same time, is there room for those of a row, are there rows enough,
    and read ahead?

    What does not begin at a multiple of 16 bytes is not read ahead; numbers of 32 bits have not
    been timed. A number of rows that varies is taken as in the first call: with few, many programs
    find nothing to do.
    """
    n = number(x.shape[-1])
    rows, pieces = hinted((x.numel() // n,)), triton.cdiv(n, config.block)
    room = pieces <= min(LANES.value, multiprocessors(x.device)) and not interpreted(tell)
    return room and rows is not None and rows[0] >= FEW and x.element_size() == 2 and n % 8 == 0


def groups_of(rows, pieces: int, programs: int, device: torch.device):
    """How many groups have room at once, with so many programs a multiprocessor."""
    most = max(1, multiprocessors(device) * programs // pieces)
    return most if dynamic(rows) else min(most, rows)


def exchange(rows, pieces: int, device: torch.device) -> Tensor:
    """A word for each piece of each row, and the counter of programs."""
    return torch.full((rows * pieces + 1,), NOTHING.value, dtype=torch.int64, device=device)


@triton.jit
def turn(WORDS, rows, PIECES: tl.constexpr):
    """When this program started: the how manieth of all; more where words are used again, as
    autotuning may do.
    """
    return (
        tl.atomic_add(WORDS + tl.cast(rows, tl.int64) * PIECES, 1, sem="relaxed").to(tl.int32) + 1
    )


@triton.jit
def tell(AT, a, b):
    """Puts two fp32 in one word, which others see whole or not at all; the lowest bit of b is lost,
    so it is not -1.

    Returns what stood there, for `hear` to depend on.
    """
    high = tl.cast(a, tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = tl.cast(b, tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFE
    return tl.atomic_xchg(AT, high | low, sem="relaxed")


@triton.jit
def hear(WORDS, before, PIECES: tl.constexpr):
    """The numbers of all pieces of a row `[LANES]` twice, 0 beyond the last, when all are there.

    The threads of a warp leave the loop together: each element is in one of them. The loop is
    inside a branch, always taken, since Triton reads ahead in no loop that has another directly
    inside.
    """
    piece = tl.arange(0, LANES)
    words = tl.zeros([LANES], tl.int64)
    if before == NOTHING:
        words = tl.load(WORDS + piece, piece < PIECES, 0, volatile=True)
        while tl.max((words == NOTHING).to(tl.int32), 0) != 0:
            words = tl.load(WORDS + piece, piece < PIECES, 0, volatile=True)
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), words.to(tl.int32).to(
        tl.float32, bitcast=True
    )
