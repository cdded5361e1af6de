"""The gradient of clamp at its bounds, which differs between releases of torch."""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes as without_modes


@functools.cache
def clamp_passes_at_bounds() -> bool:
    """Does clamp pass a gradient on where its argument is exactly a bound? In torch 2.11 it does,
    in 2.14 and 2.15 it does not. A tangent tells, without the threads that a backward would start.
    """
    with without_modes(), torch.inference_mode(False), forward_ad.dual_level():
        zero, one = torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
        slope = forward_ad.unpack_dual(forward_ad.make_dual(zero, one).clamp(min=0)).tangent
        return bool(slope.any())
