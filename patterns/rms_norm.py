"""RMS normalisation over the last dimension: x / sqrt(mean(x²) + eps) · (weight + offset).

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; weight `[n]` and offset may be
missing (Gemma: offset 1), and weight may be in fp32 beside an x in 16 bits; then the result is in
fp32. The mean is taken in fp32. Source: Zhang and Sennrich 2019, torch.nn.functional.rms_norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dynamic, reject_rows, reject_vectors
from fusion_backend.kernels.common.inputs import common_dtype, reject_dtypes_of_vectors
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.backward import backward
from fusion_backend.kernels.norm.forward import Norm, forward, not_forward, small_in_fp32


@Pattern(inductor="reduction")
def rms_norm(x: Tensor, weight: Tensor | None, offset: float | None, eps: float) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None, eps)
    if weight is None and offset is not None:
        raise ValueError("an offset belongs to a weight")
    return y if weight is None else y * (weight if offset is None else weight + offset)


@rms_norm.near_miss
def _(x, weight, offset, eps):
    """eps outside the root"""
    y = x / (torch.sqrt((x * x).mean(-1, keepdim=True)) + eps)
    return y if weight is None else y * (weight if offset is None else weight + offset)


@rms_norm.near_miss
def _(x, weight, offset, eps):
    """another dimension"""
    y = x * torch.rsqrt((x * x).mean(0, keepdim=True) + eps)
    return y if weight is None else y * (weight if offset is None else weight + offset)


@rms_norm.guard
def _(x, weight, offset, eps):
    return (
        reject_rows(x)
        or reject_vectors(x.shape[-1], weight=weight)
        or reject_dtypes_of_vectors(x, weight=weight)
        or reject_dynamic(offset=offset, eps=eps)
    )


@rms_norm.worthwhile
def _(x, weight, offset, eps, training):
    if common_dtype(x, weight) != x.dtype:
        return UNMEASURED
    return small_in_fp32(x, training) or not_forward(x)


@rms_norm.kernel(saves=("rstd",))
def _(x, weight, offset, eps, save, result_dtype):
    norm = Norm(weight, None, offset, eps, False)
    y, _, _, rstd = forward(x, None, norm, save, dtype=result_dtype)
    return y, rstd


@rms_norm.saved
def _(x, weight, offset, eps):
    """Operator for operator as in the forward, so that nothing is computed twice."""
    return torch.rsqrt(x.float().pow(2).mean(x.dim() - 1, keepdim=True) + eps).reshape(-1)


@rms_norm.backward
def _(saved, dy):
    norm = Norm(saved.weight, None, saved.offset, saved.eps, False)
    needs = (saved.needs["x"], saved.needs["weight"], False)
    return backward(dy, None, saved.x, None, saved.rstd, norm, needs)[:2]


@rms_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), 1.0, 1e-6
