"""Dropout, residual sum, layer normalisation: h = dropout(x, p) + residual, and layer_norm(h) · weight + bias.

x and residual are `[..., n]`, weight and bias `[n]`. Returns the normalised value and h. In training only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    h = F.dropout(x, p, True) + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@dropout_add_layer_norm.near_miss
def _(x, residual, weight, bias, p, eps):
    """dropout of the sum"""
    h = F.dropout(x + residual, p, True)
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@dropout_add_layer_norm.guard
def _(x, residual, weight, bias, p, eps):
    return reject_dtypes(x=x, residual=residual, weight=weight, bias=bias) or reject_dynamic(p=p, eps=eps)


@dropout_add_layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 0.1, 1e-5
