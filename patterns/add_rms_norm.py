"""Residual sum and its RMS normalisation: h = x + residual, and h / sqrt(mean(h²) + eps) · (weight
+ offset).

x and residual are `[..., n]` of one shape in fp32, bf16 or fp16, their rows up to 131072 long; one
of them may be in fp32 and the other in 16 bits, as under autocast. weight is `[n]` and has the
dtype of the sum; offset may be missing (Gemma: 1). Returns the normalised value and h, both
computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Unmeasured
from fusion_backend.kernels import (
    reject_dynamic,
    reject_rows,
    reject_shapes,
    reject_vectors,
)
from fusion_backend.kernels.common.inputs import reject_dtypes_of_sum
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.backward import backward_of_sum
from fusion_backend.kernels.norm.forward import Norm, forward, not_forward, small_in_fp32


@Pattern(inductor="reduction")
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
    return (
        reject_rows(x)
        or reject_shapes(x=x, residual=residual)
        or reject_vectors(x.shape[-1], weight=weight)
        or reject_dtypes_of_sum(x, residual, weight=weight)
        or reject_dynamic(offset=offset, eps=eps)
    )


@add_rms_norm.neighbours
def _(around, training):
    if not training and 1 in around.unread:
        return Unmeasured(
            "nobody reads the sum, which Inductor does not write either: the kernel has not been "
            "timed there; fusion.gate=always takes it"
        )


@add_rms_norm.worthwhile
def _(x, residual, weight, offset, eps, training):
    if x.dtype != residual.dtype:
        return UNMEASURED
    return small_in_fp32(x, training) or not_forward(x, residual=True)


@add_rms_norm.kernel(saves=("rstd",))
def _(x, residual, weight, offset, eps, save, read, result_dtype):
    norm = Norm(weight, None, offset, eps, False)
    y, h, _, rstd = forward(x, residual, norm, save, sum_is_read=read[1], dtype=result_dtype)
    return y, h, rstd


@add_rms_norm.saved
def _(x, residual, weight, offset, eps):
    """Operator for operator as in the forward, so that nothing is computed twice."""
    return torch.rsqrt((x + residual).float().pow(2).mean(x.dim() - 1, keepdim=True) + eps).reshape(
        -1
    )


@add_rms_norm.backward(result=True, same={"residual": "x"})
def _(saved, dy, dh=None):
    norm = Norm(saved.weight, None, saved.offset, saved.eps, False)
    return backward_of_sum(saved, dy, dh, None, norm)[:3]


@add_rms_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), 1.0, 1e-6
