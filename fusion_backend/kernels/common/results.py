"""Memory for results of kernels that may be images.

Where Inductor lays out a graph channels-last, it lays out every value of four dimensions so that is
kept for the backward. It does that before a kernel of ours writes to the value, with a kernel of
its own that fills all of it. Memory of one dimension it leaves alone: a kernel is given that, and
the images are a view of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def flat(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of one dimension for a tensor of this shape; it is not initialised."""
    return torch.empty(math.prod(shape), dtype=dtype, device=device)


def shaped(
    memory: Tensor, shape: tuple[int, ...], form: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Memory as a contiguous tensor of this shape, or as images `[n, c, h, w]` in channels-last."""
    if form == torch.contiguous_format:
        return memory.view(shape)
    n, c, h, w = shape
    return memory.view(n, h, w, c).permute(0, 3, 1, 2)
