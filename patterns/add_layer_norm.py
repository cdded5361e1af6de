"""Residual sum and its layer normalisation: h = x + residual, and (h - mean) / sqrt(var + eps) · weight + bias.

x and residual are `[..., n]`; weight and bias `[n]`, the bias may be missing. Returns the normalised value and h.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
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
    return reject_dtypes(x=x, residual=residual, weight=weight, bias=bias) or reject_dynamic(eps=eps)


@add_layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 1e-5
