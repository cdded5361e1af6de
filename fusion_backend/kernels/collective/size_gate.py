"""At which sizes a sum over ranks with its norm is faster than NCCL with Inductor's kernel, and by
which kernel: as timed by `python -m benchmarks.all_reduce`.

Every rank decides by these tables, the size of the group and the size of x alone, so that all
decide alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.reporting.reject import Reject, Unmeasured

GROUPS = (2, 4, 8)
# Ranks -> [smallest, largest] bytes of x at which the kernels won at every size that was timed, in
# bf16. Not timed yet.
TIMED: dict[int, tuple[int, int]] = {}
# Ranks -> bytes of x from which two shots were faster than one. Until that is timed: two ranks move
# as many bytes either way and wait once less in one shot; of more ranks, each reads world - 1 times
# x in one shot, and 2 (world - 1) / world times in two.
TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 19, 8: 1 << 18}
LARGEST = 64 << 20  # bytes of x: twice as much is allocated on each rank


def takes_two_shots(world: int, size: int) -> bool:
    """Which of the kernels sums up x of `size` bytes?"""
    return world in TWO_SHOTS_FROM and size >= TWO_SHOTS_FROM[world]


def reject_size(x: Tensor) -> Reject | None:
    """Refuse x of a size that is not known when the graph is compiled, or larger than LARGEST."""
    size = number(x.numel())
    if dynamic(size):
        return Reject("the size of x is dynamic, and what is faster depends on it")
    if size * x.element_size() > LARGEST:
        return Reject(f"x has more than {LARGEST >> 20} MB")


def untimed(x: Tensor, world: int) -> Unmeasured | None:
    """Was the kernel faster at this size, with so many ranks?"""
    size = number(x.numel()) * x.element_size()
    if world not in TIMED or x.dtype != torch.bfloat16:
        told = f"{world} ranks" if x.dtype == torch.bfloat16 else f"{world} ranks in {x.dtype}"
        return Unmeasured(f"the sum over {told} has not been timed; fusion.gate=always takes it")
    smallest, largest = TIMED[world]
    if not smallest <= size <= largest:
        return Unmeasured(
            f"x has {size:,} bytes, and over {world} ranks the kernel was faster from {smallest:,} "
            f"to {largest:,}; fusion.gate=always takes it"
        )
