"""Quantise to int8, symmetric, a scale for each row: scale = max(abs(x)) / 127, q = clamp(round(x / scale), -128, 127).

x is `[..., n]`. The scale is not below eps, where that is given. Returns q and scale `[..., 1]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def quantize_per_token(x: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


@quantize_per_token.spelling
def _(x, eps):
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps):
    """one scale for everything"""
    scale = x.abs().amax() / 127
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps):
    """rounded towards zero"""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(x / scale, -128, 127).to(torch.int8), scale


@quantize_per_token.guard
def _(x, eps):
    return reject_dtypes(x=x) or reject_dynamic(eps=eps)


@quantize_per_token.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-5
