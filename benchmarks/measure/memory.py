"""Memory on the GPU: the peak of a step, and what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure.wall_time import synchronize


def saved_bytes(fn: Callable, args: list) -> int:
    """Bytes of the tensors that the forward keeps for the backward, each storage once.

    Compiled functions keep theirs with ctx.save_for_backward, which the hooks see as well.
    """
    storages: dict[int, int] = {}

    @torch.compiler.disable  # it is called from frames that Dynamo looks at
    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outs = fn(*args)  # held, so that no address comes twice
    del outs
    return sum(storages.values())


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most memory a step takes on the GPU beyond what was allocated before it."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = step()  # held until the peak is read
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak
