"""Residual sum and its RMS normalisation: h = x + residual, and h / sqrt(mean(h²) + eps) · (weight + offset).

x and residual are `[..., n]`, weight `[n]`; offset may be missing (Gemma: 1). Returns the normalised value and h.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, offset: float | None, eps: float
) -> tuple[Tensor, Tensor]:
    h = x + residual
    y = F.rms_norm(h, h.shape[-1:], None, eps)
    return y * (weight if offset is None else weight + offset), h


@add_rms_norm.near_miss
def _(x, residual, weight, offset, eps):
    """the sum of the normalised value and the residual"""
    y = F.rms_norm(x, x.shape[-1:], None, eps) * (weight if offset is None else weight + offset)
    return y + residual, x + residual


@add_rms_norm.guard
def _(x, residual, weight, offset, eps):
    return reject_dtypes(x=x, residual=residual, weight=weight) or reject_dynamic(offset=offset, eps=eps)


@add_rms_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), 1.0, 1e-6
