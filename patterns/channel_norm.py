"""Normalisation over the channels of a channels-first tensor, dimension 1: layer norm, RMS norm or
unit length.

y = u · weight + bias; u is (x - mean) / sqrt(var + eps) in a layer norm, x / sqrt(mean(x²) + eps)
in an RMS norm, and scale · x / max(‖x‖, eps) of unit length. x is `[n, c, ...]` with one dimension
or more behind the channels, dense, in fp32, bf16 or fp16, of up to 1024 channels; weight and bias
have one element for each channel, `[c, 1, 1]` or `[1, c, 1, 1]` for images, and may be missing, as
may the scale, a number. Sums are taken in fp32; backward keeps x alone. Channels-last tensors are
left to Inductor. Source: LayerNorm with data_format="channels_first" of ConvNeXt (Liu et al. 2022),
LayerNorm2d of Segment Anything, RMS_norm of Wan's VAE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.channel_tiles import reject_channels_first, rows_there
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.channel_norm import (
    ChannelNorm,
    Kind,
    forward,
    reject_per_channel,
)
from fusion_backend.kernels.norm.channel_norm_backward import backward


@Pattern(inductor="reduction")
def channel_norm(
    x: Tensor,
    scale: float | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: Kind,
) -> Tensor:
    if scale is not None and norm != "length":
        raise ValueError("a scale belongs to unit length")
    y = normalised(x, 1, eps, norm)
    return affine(y if scale is None else y * scale, weight, bias)


def normalised(x, dim, eps, norm):
    if norm == "length":
        return F.normalize(x, dim=dim, eps=eps)
    x = x - x.mean(dim, keepdim=True) if norm == "layer" else x
    return x * torch.rsqrt((x * x).mean(dim, keepdim=True) + eps)


def affine(y, weight, bias):
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@channel_norm.near_miss
def _(x, scale, weight, bias, eps, norm):
    """over another dimension"""
    y = normalised(x, 2, eps, norm)
    return affine(y if scale is None else y * scale, weight, bias)


@channel_norm.near_miss
def _(x, scale, weight, bias, eps, norm):
    """eps added to the root"""
    x = x - x.mean(1, keepdim=True) if norm == "layer" else x
    squares = (x * x).sum(1, keepdim=True) if norm == "length" else (x * x).mean(1, keepdim=True)
    y = x / (squares.sqrt() + eps)
    return affine(y if scale is None else y * scale, weight, bias)


@channel_norm.near_miss
def _(x, scale, weight, bias, eps, norm):
    """the sum of squares divided by one channel less"""
    x = x - x.mean(1, keepdim=True) if norm == "layer" else x
    var = (x * x).sum(1, keepdim=True) / (x.shape[1] - 1)
    y = x * torch.rsqrt(var + eps)
    return affine(y if scale is None else y * scale, weight, bias)


@channel_norm.guard
def _(x, scale, weight, bias, eps, norm):
    return (
        reject_dtypes(x=x, weight=weight, bias=bias)
        or reject_channels_first(x=x)
        or reject_per_channel(x, weight=weight, bias=bias)
        or reject_dynamic(scale=scale, eps=eps)
    )


@channel_norm.neighbours
def _(around, training):
    if around.laid_out_beside:
        return rows_there(around.laid_out_beside[0])


@channel_norm.worthwhile
def _(x, scale, weight, bias, eps, norm, training):
    return UNMEASURED


@channel_norm.kernel
def _(x, scale, weight, bias, eps, norm):
    return forward(x, ChannelNorm(weight, bias, eps, norm, scale))


@channel_norm.backward
def _(saved, dy):
    needs = tuple(saved.needs[name] for name in ("x", "weight", "bias"))
    norm = ChannelNorm(saved.weight, saved.bias, saved.eps, saved.norm, saved.scale)
    return backward(dy, saved.x, norm, needs)


@channel_norm.inputs(dict(b=2, c=12, n=5), dict(b=32, c=96, n=56))
def _(tensor, b, c, n, length=0):
    scale, norm = (c**0.5, "length") if length else (None, "layer")
    return tensor(b, c, n, n), scale, tensor(c, 1, 1), tensor(c, 1, 1), 1e-6, norm
