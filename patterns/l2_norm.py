"""Rows of unit length: x / max(‖x‖, eps), over the last dimension; without eps, x / ‖x‖.

x is `[..., n]`; the sum of squares is taken in fp32. Source: torch.nn.functional.normalize.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def l2_norm(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return F.normalize(x, dim=-1, eps=eps)


@l2_norm.near_miss
def _(x, eps):
    """eps added, not a lower bound"""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + (0.1 if eps is None else eps))


@l2_norm.near_miss
def _(x, eps):
    """the norm of another order"""
    return x / torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True).clamp_min(0.0 if eps is None else eps)


@l2_norm.guard
def _(x, eps):
    return reject_dtypes(x=x) or reject_dynamic(eps=eps)


@l2_norm.inputs(dict(rows=7, n=100), dict(rows=65536, n=1024))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-12
