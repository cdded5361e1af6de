"""Quantise to int8, symmetric, a scale for each row: scale = max(abs(x)) / 127, q = clamp(round(x /
scale), -128, 127).

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long. If eps is given, the scale is at
least eps. Returns q and scale `[..., 1]`. Computed in fp32; q is computed with the scale as
returned, in the dtype of x. A row with NaN has NaN as its scale and 0 as q. Not differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern
from fusion_backend.kernels import number, reject_dtypes, reject_dynamic, reject_rows
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.quantize.quantize import forward


@Pattern(inductor="reduction")
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
    return reject_dtypes(x=x) or reject_rows(x) or reject_dynamic(eps=eps)


@quantize_per_token.worthwhile
def _(x, eps, training):
    if not 2048 <= number(x.shape[-1]) <= 8192 or statically_known_true(x.numel() < 1 << 20):
        return UNMEASURED


@quantize_per_token.kernel
def _(x, eps, read):
    return forward(x, None, None, None, eps, scale_is_read=read[1])


@quantize_per_token.inputs(dict(rows=7, n=100), dict(rows=8192, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-5
