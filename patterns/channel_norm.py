"""Layer or RMS normalisation over the channels of a channels-first tensor: (x - mean) / sqrt(var +
eps) · weight + bias, with mean and var over dimension 1; the RMS norm has mean(x²) for var and
subtracts nothing.

x is `[n, c, ...]` with one dimension or more behind the channels, dense, in fp32, bf16 or fp16, of
up to 1024 channels; weight and bias have one element for each channel, `[c, 1, 1]` or
`[1, c, 1, 1]` for images, and may be missing. Sums are taken in fp32; backward keeps x alone.
Source: ConvNeXt's LayerNorm with data_format="channels_first" (Liu et al. 2022), LayerNorm2d of
Segment Anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.channel_norm import (
    Affine,
    forward,
    reject_channels_first,
    reject_per_channel,
)
from fusion_backend.kernels.norm.channel_norm_backward import backward
from fusion_backend.kernels.norm.plain import Kind


@Pattern(inductor="reduction")
def channel_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: Kind
) -> Tensor:
    return affine(normalised(x, 1, eps, norm), weight, bias)


def normalised(x, dim, eps, norm):
    x = x - x.mean(dim, keepdim=True) if norm == "layer" else x
    return x * torch.rsqrt((x * x).mean(dim, keepdim=True) + eps)


def affine(y, weight, bias):
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@channel_norm.near_miss
def _(x, weight, bias, eps, norm):
    """over another dimension"""
    return affine(normalised(x, 2, eps, norm), weight, bias)


@channel_norm.near_miss
def _(x, weight, bias, eps, norm):
    """eps outside the root"""
    x = x - x.mean(1, keepdim=True) if norm == "layer" else x
    return affine(x / ((x * x).mean(1, keepdim=True).sqrt() + eps), weight, bias)


@channel_norm.near_miss
def _(x, weight, bias, eps, norm):
    """the sum of squares divided by one channel less"""
    x = x - x.mean(1, keepdim=True) if norm == "layer" else x
    var = (x * x).sum(1, keepdim=True) / (x.shape[1] - 1)
    return affine(x * torch.rsqrt(var + eps), weight, bias)


@channel_norm.guard
def _(x, weight, bias, eps, norm):
    return (
        reject_dtypes(x=x, weight=weight, bias=bias)
        or reject_channels_first(x)
        or reject_per_channel(x, weight=weight, bias=bias)
        or reject_dynamic(eps=eps)
    )


@channel_norm.worthwhile
def _(x, weight, bias, eps, norm, training):
    return UNMEASURED


@channel_norm.kernel
def _(x, weight, bias, eps, norm):
    return forward(x, Affine(weight, bias, eps, norm == "layer"))


@channel_norm.backward
def _(saved, dy):
    needs = tuple(saved.needs[name] for name in ("x", "weight", "bias"))
    norm = Affine(saved.weight, saved.bias, saved.eps, saved.norm == "layer")
    return backward(dy, saved.x, norm, needs)


@channel_norm.inputs(dict(b=2, c=60, n=5), dict(b=32, c=96, n=56))
def _(tensor, b, c, n):
    return tensor(b, c, n, n), tensor(c, 1, 1), tensor(c, 1, 1), 1e-6, "layer"
