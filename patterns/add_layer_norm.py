"""Residual sum and its layer normalisation: h = x + residual, and (h - mean) / sqrt(var + eps) ·
weight + bias.

x and residual are `[..., n]` of one shape in fp32, bf16 or fp16, their rows up to 131072 long; one
of them may be in fp32 and the other in 16 bits, as under autocast. weight and bias are `[n]` and
have the dtype of the sum; the bias may be missing. Returns the normalised value and h, both
computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import BackwardOnly, Pattern, Unmeasured
from fusion_backend.kernels import (
    reject_dynamic,
    reject_rows,
    reject_shapes,
    reject_vectors,
)
from fusion_backend.kernels.common.inputs import reject_dtypes_of_sum
from fusion_backend.kernels.common.rows import RESULTS, UNMEASURED
from fusion_backend.kernels.norm.backward import backward_of_sum
from fusion_backend.kernels.norm.forward import Norm, forward, not_forward, small_in_fp32


@Pattern(inductor="reduction")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@add_layer_norm.near_miss
def _(x, residual, weight, bias, eps):
    """the residual added afterwards"""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) + residual, x + residual


@add_layer_norm.guard
def _(x, residual, weight, bias, eps):
    return (
        reject_rows(x)
        or reject_shapes(x=x, residual=residual)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes_of_sum(x, residual, weight=weight, bias=bias)
        or reject_dynamic(eps=eps)
    )


@add_layer_norm.neighbours
def _(around, training):
    if not training and 1 in around.unread:
        return Unmeasured(
            "nobody reads the sum, which Inductor does not write either: the kernel has not been "
            "timed there; fusion.gate=always takes it"
        )


@add_layer_norm.worthwhile
def _(x, residual, weight, bias, eps, training):
    if x.dtype != residual.dtype:
        return UNMEASURED
    if no := small_in_fp32(x, training):
        return no
    if training:
        return BackwardOnly(
            f"what Inductor's forward gives need not be kept for backward ({RESULTS})"
        )
    return not_forward(x, residual=True)


@add_layer_norm.kernel(saves=("mean", "rstd"))
def _(x, residual, weight, bias, eps, save, read, result_dtype):
    norm = Norm(weight, bias, None, eps, True)
    return forward(x, residual, norm, save, sum_is_read=read[1], dtype=result_dtype)


@add_layer_norm.saved
def _(x, residual, weight, bias, eps):
    """Operator for operator as in the forward, so that nothing is computed twice."""
    _, mean, rstd = torch.native_layer_norm((x + residual).float(), x.shape[-1:], None, None, eps)
    return mean.reshape(-1), rstd.reshape(-1)


@add_layer_norm.backward(result=True, same={"residual": "x"})
def _(saved, dy, dh=None):
    norm = Norm(saved.weight, saved.bias, None, saved.eps, True)
    return backward_of_sum(saved, dy, dh, saved.mean, norm)


@add_layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 1e-5
