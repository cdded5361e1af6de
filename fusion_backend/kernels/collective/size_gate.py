"""At which sizes a sum over ranks with its norm is faster than NCCL with Inductor's kernel, and by
which kernel: as timed by `python -m benchmarks.all_reduce`.

Every rank decides by these tables, the size of the group and the size of x alone, so that all
decide alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.reporting.reject import Reject, Unmeasured

GROUPS = (2, 4, 8)


class Timed(NamedTuple):
    """What was timed: bf16 rows of n, summed over the ranks, the residual sum and the RMS norm,
    without gradients, at seven sizes of x from `smallest` to `largest` bytes, each four times the
    one before. The kernels won at all of them.
    """

    gpus: tuple[str, ...]  # NVLink goes from each to all others
    n: int
    smallest: int
    largest: int


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
# Ranks -> what was timed. Source: benchmarks/results/h100-all-reduce.json and h200-all-reduce.json
TIMED: dict[int, Timed] = {
    2: Timed((H100, H200), 4096, 1 << 14, 1 << 26),
    4: Timed((H100,), 4096, 1 << 14, 1 << 26),
}
# Ranks -> bytes of x from which two shots are taken to be faster than one: each rank reads
# world - 1 times x in one shot, and 2 (world - 1) / world times in two. Over two ranks they are not
# faster, at any size that was timed: as many bytes move either way, and one shot waits once less.
# Over four they were from 1 MB, and not up to 256 KB. Eight were not timed: theirs is a guess.
TWO_SHOTS_FROM: dict[int, int] = {4: 1 << 20, 8: 1 << 18}
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


ALWAYS = "fusion.gate=always takes it"
# Is the kernel used without being asked for, where it was timed? It was faster in CUDA graphs. By
# the host, small sums took as long as NCCL's, and a step of a model over two ranks once took 1.36
# times as long (docs/distributed.md). NCCL, too, was timed without NVLS.
BY_DEFAULT = False


def untimed(
    x: Tensor, residual: Tensor | None, kind: str, world: int, training: bool
) -> Unmeasured | None:
    """Was the kernel faster at this size, with so many ranks?"""
    if world not in TIMED:
        return Unmeasured(f"the sum over {world} ranks has not been timed; {ALWAYS}")
    timed, n = TIMED[world], number(x.shape[-1])
    others = {
        "with gradients": training,
        f"in {x.dtype}": x.dtype != torch.bfloat16,
        "with a layer norm": kind != "rms",
        "without a residual": residual is None,
        f"of rows of {n}": n != timed.n,
    }
    told = next((what for what, holds in others.items() if holds), None)
    if told is not None:
        return Unmeasured(f"the sum over {world} ranks has not been timed {told}; {ALWAYS}")
    size = number(x.numel()) * x.element_size()
    if not timed.smallest <= size <= timed.largest:
        return Unmeasured(
            f"x has {size:,} bytes, and over {world} ranks the kernel was faster from "
            f"{timed.smallest:,} to {timed.largest:,}; {ALWAYS}"
        )
    if not BY_DEFAULT:
        return Unmeasured(
            f"over {world} ranks the kernel was faster at this size in CUDA graphs, but not where "
            f"the host takes longer than the GPU; {ALWAYS}"
        )
    return None


def other_gpus(gpu: str, world: int) -> Unmeasured | None:
    """Was it timed on such GPUs? Empty where they differ, or NVLink does not go between all."""
    timed = TIMED[world].gpus
    if gpu not in timed:
        found = f"on {gpu}" if gpu else "on GPUs that differ or are not linked by NVLink"
        there = " and ".join(timed)
        return Unmeasured(
            f"the sum over {world} ranks has been timed on {there}, and not {found}; {ALWAYS}"
        )
