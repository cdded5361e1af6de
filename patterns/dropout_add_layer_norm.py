"""Dropout, residual sum, layer normalisation: h = dropout(x, p) + residual, and layer_norm(h) ·
weight + bias.

x and residual are `[..., n]` of one shape in fp32, bf16 or fp16, their rows up to 131072 long; x
may be in 16 bits beside a residual in fp32, as under autocast. weight and bias are `[n]` and have
the dtype of the sum. Returns the normalised value and h, both computed in fp32 and rounded once.
In training only. The mask is drawn like that of dropout_add: from a new seed at each call, and with
other bits than eager or plain Inductor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import (
    dropped,
    reject_dynamic,
    reject_rows,
    reject_shapes,
    reject_vectors,
)
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.inputs import reject_dtypes_of_sum
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.backward import backward_of_sum
from fusion_backend.kernels.norm.forward import Norm, forward


@Pattern
def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    h = F.dropout(x, p, True) + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@dropout_add_layer_norm.seeded
def _(x, residual, weight, bias, p, eps, seed):
    h = dropped(x, seed, p) + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@dropout_add_layer_norm.near_miss
def _(x, residual, weight, bias, p, eps):
    """dropout of the sum"""
    h = F.dropout(x + residual, p, True)
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@dropout_add_layer_norm.guard
def _(x, residual, weight, bias, p, eps):
    return (
        reject_rows(x)
        or reject_shapes(x=x, residual=residual)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes_of_sum(x, residual, weight=weight, bias=bias)
        or reject_narrow_residual(x, residual)
        or reject_dynamic(p=p, eps=eps)
    )


def reject_narrow_residual(x, residual):
    """The kernel writes two gradients, that of the sum and that of x."""
    if residual.dtype != torch.promote_types(x.dtype, residual.dtype):
        return Reject(f"residual is {residual.dtype} and x {x.dtype}")


@dropout_add_layer_norm.worthwhile
def _(x, residual, weight, bias, p, eps, training):
    if x.dtype != residual.dtype or statically_known_true(x.numel() < 192 * 5120):
        return UNMEASURED


@dropout_add_layer_norm.kernel(saves=("mean", "rstd"))
def _(x, residual, weight, bias, p, eps, seed, save, read, result_dtype):
    norm = Norm(weight, bias, None, eps, True, Dropout(seed, p))
    return forward(x, residual, norm, save, sum_is_read=read[1], dtype=result_dtype)


@dropout_add_layer_norm.backward(result=True)
def _(saved, dy, dh=None):
    norm = Norm(saved.weight, saved.bias, None, saved.eps, True, Dropout(saved.seed, saved.p))
    return backward_of_sum(saved, dy, dh, saved.mean, norm)


@dropout_add_layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 0.1, 1e-5
