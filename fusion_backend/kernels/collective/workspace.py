"""The memory that the ranks of a process group share for their sums.

    0       where the memory of each rank begins, int64 [8]
    64      the steps that each program has taken, int32 [PROGRAMS]
    FLAGS   the steps of program p of rank q, as q has announced them here, int32 [PROGRAMS, world]
    DATA    rows, twice `capacity` bytes: launches take turns

Memory is made by the first call that needs it, and again, larger, where a call needs more; then all
ranks do so, in the same call. It is not given back: a CUDA graph that was captured before goes on
to use it. At most half of it is of no use, besides what smaller calls have made before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fusion_backend.compat.symmetric_memory import Shared, process_group, share

MOST_RANKS = 8
PROGRAMS = 256  # two on each multiprocessor of an H100
ROUNDS = 64
FLAGS = tl.constexpr(2048)
DATA = tl.constexpr(16384)
SMALLEST = 1 << 20

MADE: dict[tuple[str, torch.device], list[tuple[object, Workspace]]] = {}


class Workspace(NamedTuple):
    """`pointers` int64 `[8]` and `rounds` int32 `[PROGRAMS]` are views of this rank's memory."""

    pointers: Tensor
    rounds: Tensor
    capacity: int
    rank: int
    world: int
    shared: object


def workspace_of(group: str, size: int, device: torch.device) -> Workspace:
    """A workspace for `size` bytes of rows on each rank. Raises RuntimeError where one would have
    to be made while a CUDA graph is captured.
    """
    owner = process_group(group)
    made = MADE.setdefault((group, device), [])
    if made and made[-1][0] is not owner:  # of a job that has ended: a group of the same name
        made.clear()
    if made and made[-1][1].capacity >= size:
        return made[-1][1]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the ranks share no memory for {size} bytes yet, and it cannot be made while a CUDA "
            "graph is captured: call the function once before"
        )
    capacity = max(SMALLEST, 1 << (size - 1).bit_length())
    shared = share(DATA.value + 2 * capacity, device, group)
    made.append((owner, laid_out(shared, capacity)))
    return made[-1][1]


def laid_out(shared: Shared, capacity: int) -> Workspace:
    """The views of memory that is all zeros, with the pointers written into it."""
    world, memory = len(shared.pointers), shared.memory
    pointers = memory[: 8 * MOST_RANKS].view(torch.int64)
    rounds = memory[ROUNDS : ROUNDS + 4 * PROGRAMS].view(torch.int32)
    pointers[:world] = torch.tensor(shared.pointers, device=memory.device)
    return Workspace(pointers, rounds, capacity, shared.rank, world, shared)


def group_size(group: str) -> int:
    """How many ranks there are in the process group of this name."""
    return process_group(group).size()


def pretended(x: Tensor, group: str) -> Workspace:
    """What a kernel is compiled for where nothing was shared yet; x may be a fake tensor. For a
    group that is not there, the first of as many ranks as possible.
    """
    pointers = x.new_empty(MOST_RANKS, dtype=torch.int64)
    rounds = x.new_empty(PROGRAMS, dtype=torch.int32)
    try:
        owner = process_group(group)
    except (RuntimeError, ValueError):
        return Workspace(pointers, rounds, SMALLEST, 0, MOST_RANKS, None)
    return Workspace(pointers, rounds, SMALLEST, owner.rank(), owner.size(), None)
