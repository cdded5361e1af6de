"""Rows that programs share, because one cannot hold a row and what it sums up while it reads the
next.

A group of programs walks through rows, a piece of each row to a program. A program publishes two
numbers of its piece in a mailbox, receives those of the other pieces, and writes its piece of the
result, while the next rows are on the way to shared memory.

No program waits for ever. A program's group and piece follow from its ticket, a counter of the
programs that have started, not from its program id. So all groups that have started are complete
but for the last, and when they have finished, the last has the room to become so: room for as many
programs as a row has pieces is enough, and one on every multiprocessor is asked for. (Where several
such kernels run at the same time, each may have a last group that waits: that takes room for as
many times the pieces as there are kernels.) A program has published before it receives, because
`receive` depends on what the atomic exchange of `publish` returned. Triton's interpreter runs one
program after another, so there none may wait.
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
EMPTY = tl.constexpr(-1)  # a word of the mailbox in which nothing was published


def shareable(x: Tensor, config: Config) -> bool:
    """Do programs run at the same time, is there room for those of a row, are there rows enough,
    and read ahead?

    What does not begin at a multiple of 16 bytes is not read ahead; numbers of 32 bits have not
    been timed. A number of rows that varies is taken as in the first call: with few, many programs
    find nothing to do.
    """
    n = number(x.shape[-1])
    rows, pieces = hinted((x.numel() // n,)), triton.cdiv(n, config.block)
    room = pieces <= min(LANES.value, multiprocessors(x.device)) and not interpreted(publish)
    return room and rows is not None and rows[0] >= FEW and x.element_size() == 2 and n % 8 == 0


def groups_of(rows, pieces: int, programs: int, device: torch.device):
    """How many groups have room at once, with so many programs a multiprocessor."""
    most = max(1, multiprocessors(device) * programs // pieces)
    return most if dynamic(rows) else min(most, rows)


def mailbox(rows, pieces: int, device: torch.device) -> Tensor:
    """A word for each piece of each row, and the counter of tickets: `[rows · pieces + 1]`
    int64.
    """
    return torch.full((rows * pieces + 1,), EMPTY.value, dtype=torch.int64, device=device)


@triton.jit
def ticket(MAILBOX, rows, PIECES: tl.constexpr):
    """How many programs have started before this one. A mailbox that is used again, as autotuning
    may do, counts on: then no program finds a row to do.
    """
    counter = MAILBOX + tl.cast(rows, tl.int64) * PIECES
    return tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32) + 1


@triton.jit
def publish(AT, a, b):
    """Writes two fp32 as one word, which others see whole or not at all. The lowest bit of b is
    cleared, so that the word is not EMPTY.

    Returns the word that was there, for `receive` to depend on.
    """
    high = tl.cast(a, tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = tl.cast(b, tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFE
    return tl.atomic_xchg(AT, high | low, sem="relaxed")


@triton.jit
def receive(WORDS, before, PIECES: tl.constexpr):
    """Waits for the two numbers of each piece of a row: two vectors `[LANES]`, 0 beyond the last.

    The threads of a warp leave the loop together: each element is in one of them. The loop is
    inside a branch, always taken, since Triton reads ahead in no loop that has another directly
    inside.
    """
    piece = tl.arange(0, LANES)
    words = tl.zeros([LANES], tl.int64)
    if before == EMPTY:
        words = tl.load(WORDS + piece, piece < PIECES, 0, volatile=True)
        while tl.max((words == EMPTY).to(tl.int32), 0) != 0:
            words = tl.load(WORDS + piece, piece < PIECES, 0, volatile=True)
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b = words.to(tl.int32).to(tl.float32, bitcast=True)
    return a, b
