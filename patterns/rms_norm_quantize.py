"""RMS normalisation, quantised to int8 with a scale for each row: y = x / sqrt(mean(x²) + norm_eps)
· (weight + offset); scale = max(abs(y)) / 127, q = clamp(round(y / scale), -128, 127).

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; weight `[n]` and offset may be
missing. The arguments eps, by and bound are those of quantize_per_token: "reciprocal" gives q of
y · (1 / scale), "inverse" q of y · scale, where scale = 127 / max(abs(y)). Returns q and scale
`[..., 1]`, not y. Computed in fp32; q is computed with the scale as returned, in the dtype of x.
Only the scale has a gradient; it is the reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern
from fusion_backend.kernels import (
    number,
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_vectors,
)
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.quantize.quantize import forward
from fusion_backend.kernels.quantize.scales import Bound, By, largest, scaled


@Pattern(inductor="reduction")
def rms_norm_quantize(
    x: Tensor, weight: Tensor | None, offset: float | None, norm_eps: float, eps: float | None,
    by: By, bound: Bound,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if weight is None and offset is not None:
        raise ValueError("an offset belongs to a weight")
    y = F.rms_norm(x, x.shape[-1:], None, norm_eps)
    y = y if weight is None else y * (weight if offset is None else weight + offset)
    units, scale = scaled(y, largest(y), eps, by, bound)
    return torch.clamp(torch.round(units), -128, 127).to(torch.int8), scale


@rms_norm_quantize.spelling
def _(x, weight, offset, norm_eps, eps, by, bound):
    y = F.rms_norm(x, x.shape[-1:], None, norm_eps)
    y = y if weight is None else y * (weight if offset is None else weight + offset)
    units, scale = scaled(y, largest(y), eps, by, bound)
    return torch.clamp(torch.round(units), -127, 127).to(torch.int8), scale


@rms_norm_quantize.near_miss
def _(x, weight, offset, norm_eps, eps, by, bound):
    """the scale of what is normalised"""
    y = F.rms_norm(x, x.shape[-1:], weight if offset is None else weight + offset, norm_eps)
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return torch.clamp(torch.round(y / scale), -128, 127).to(torch.int8), scale


@rms_norm_quantize.near_miss
def _(x, weight, offset, norm_eps, eps, by, bound):
    """one scale for everything"""
    y = F.rms_norm(x, x.shape[-1:], weight if offset is None else weight + offset, norm_eps)
    scale = y.abs().amax() / 127
    return torch.clamp(torch.round(y / scale), -128, 127).to(torch.int8), scale


@rms_norm_quantize.near_miss
def _(x, weight, offset, norm_eps, eps, by, bound):
    """the weight after the scale"""
    y = F.rms_norm(x, x.shape[-1:], None, norm_eps)
    scale = y.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    y = y * (weight if offset is None else weight + offset)
    return torch.clamp(torch.round(y / scale), -128, 127).to(torch.int8), scale


@rms_norm_quantize.guard
def _(x, weight, offset, norm_eps, eps, by, bound):
    return (
        reject_rows(x)
        or reject_vectors(x.shape[-1], weight=weight)
        or reject_dtypes(x=x, weight=weight)
        or reject_dynamic(offset=offset, norm_eps=norm_eps, eps=eps)
    )


@rms_norm_quantize.worthwhile
def _(x, weight, offset, norm_eps, eps, by, bound, training):
    if by != "scale":
        return UNMEASURED
    if not 2048 <= number(x.shape[-1]) <= 8192 or statically_known_true(x.numel() < 1 << 20):
        return UNMEASURED


@rms_norm_quantize.kernel
def _(x, weight, offset, norm_eps, eps, by, bound, read):
    return forward(x, weight, offset, norm_eps, eps, scale_is_read=read[1], by=by, bound=bound)


@rms_norm_quantize.inputs(dict(rows=6, n=100), dict(rows=8192, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), 1.0, 1e-6, 1e-5, "scale", "scale"
