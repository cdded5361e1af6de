"""Symmetric memory of torch.distributed: memory of each rank of a process group that all others can
read and write.

Each name was checked in 2.11 and 2.14.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shared(NamedTuple):
    """`memory`: this rank's own part, uint8 `[size]`. `pointers`: where each rank's part begins, as
    this rank addresses it. `handle` keeps the parts of the others mapped.
    """

    memory: Tensor
    pointers: list[int]
    rank: int
    handle: object


def process_group(group: str):
    """The process group of this name. Raises RuntimeError or ValueError where there is none."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)


def share(size: int, device: torch.device, group: str) -> Shared:
    """New memory of zeros on every rank of a group; a collective call. No other code has a part of
    the allocation: symm_mem.empty() would take it from a pool.

    A rank returns only after all have written their zeros. Raises RuntimeError where a rank cannot
    reach the memory of another.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = _symmetric_memory.rendezvous(memory, group)
    return Shared(memory, list(handle.buffer_ptrs), handle.rank, handle)


def backend_of(device: torch.device) -> str | None:
    """Which library makes the memory: "CUDA", "NVSHMEM" or "NCCL"; None where there is none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory.get_backend(device)


def linked_by_nvlink(gpu: int) -> list[int]:
    """The visible GPUs to which NVLink goes from this one, directly or by a switch."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return [other for other, links in enumerate(matrix[gpu]) if links and other != gpu]
    except (ImportError, RuntimeError, IndexError):  # no NVML, say
        return []
