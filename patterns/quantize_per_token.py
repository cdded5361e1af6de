"""Quantise to int8, symmetric, a scale for each row: scale = max(abs(x)) / 127, q = clamp(round(x /
scale), -128, 127).

Many programs multiply by the inverse of the scale. It is rounded, and gives other integers. The
argument `by` has one of these values:

- "scale": q of x / scale;
- "reciprocal": q of x · (1 / scale);
- "inverse": q of x · scale, where scale = 127 / max(abs(x)), as in BitNet.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long. eps, if given, is the lower bound
of the scale, or with bound "largest" of max(abs(x)). Returns q and scale `[..., 1]`. Computed in
fp32; q is computed with the scale as returned, in the dtype of x, or in fp32 with upcast "fp32",
which stands for x.float(). A row with NaN has NaN as its scale and 0 as q. Not differentiable.

Source of the inverse: H. Wang et al., "BitNet: Scaling 1-bit Transformers for Large Language
Models" (2023).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern
from fusion_backend.kernels import number, reject_dtypes, reject_dynamic, reject_rows
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.quantize.quantize import forward
from fusion_backend.kernels.quantize.scales import Bound, By, largest, scaled


@Pattern(inductor="reduction")
def quantize_per_token(
    x: Tensor, eps: float | None, by: By, bound: Bound, upcast: Literal["fp32", "none"]
) -> tuple[Tensor, Tensor]:
    # "fp32" comes first: of two forms that fit, the one that reads the narrow x.
    x = x.float() if upcast == "fp32" else x
    units, scale = scaled(x, largest(x), eps, by, bound)
    return torch.clamp(torch.round(units), -128, 127).to(torch.int8), scale


@quantize_per_token.spelling
def _(x, eps, by, bound, upcast):
    x = x.float() if upcast == "fp32" else x
    units, scale = scaled(x, largest(x), eps, by, bound)
    return torch.clamp(torch.round(units), -127, 127).to(torch.int8), scale


@quantize_per_token.spelling
def _(x, eps, by, bound, upcast):
    x = x.float() if upcast == "fp32" else x
    units, scale = scaled(x, largest(x), eps, by, bound)  # units of at most 127
    return torch.round(units).to(torch.int8), scale


@quantize_per_token.spelling
def _(x, eps, by, bound, upcast):
    top, x = (largest(x).float(), x.float()) if upcast == "fp32" else (largest(x), x)
    units, scale = scaled(x, top, eps, by, bound)
    return torch.clamp(torch.round(units), -128, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps, by, bound, upcast):
    """one scale for everything"""
    scale = x.abs().amax() / 127
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps, by, bound, upcast):
    """rounded towards zero"""
    units, scale = scaled(x, largest(x), eps, by, bound)
    return torch.clamp(units, -128, 127).to(torch.int8), scale


@quantize_per_token.guard
def _(x, eps, by, bound, upcast):
    return reject_dtypes(x=x) or reject_rows(x) or reject_dynamic(eps=eps)


@quantize_per_token.worthwhile
def _(x, eps, by, bound, upcast, training):
    if by != "scale" or upcast == "fp32":
        return UNMEASURED
    if not 2048 <= number(x.shape[-1]) <= 8192 or statically_known_true(x.numel() < 1 << 20):
        return UNMEASURED


@quantize_per_token.kernel
def _(x, eps, by, bound, upcast, read):
    wide = upcast == "fp32"
    return forward(x, None, None, None, eps, scale_is_read=read[1], by=by, bound=bound, wide=wide)


@quantize_per_token.inputs(dict(rows=7, n=100), dict(rows=8192, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-5, "scale", "scale", "none"
