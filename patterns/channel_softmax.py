"""Softmax, or its logarithm, over the channels of a channels-first tensor, dimension 1. The
logarithm may be written as a difference, x - logsumexp(x).

x is `[n, c, ...]` with one dimension or more behind the channels, dense, in fp32, bf16 or fp16, of
up to 1024 channels; with upcast "fp32" it is cast first, and the result is fp32. Computed in fp32;
a position of -inf alone is NaN, as in torch. The backward keeps the result. Channels-last tensors
are left to Inductor. Segmentation has this for the classes of a pixel, slot attention for the slots
of a token. Source: torch.softmax and torch.log_softmax with dim=1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.channel_tiles import reject_channels_first
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.softmax.channels import Kind, backward, forward


@Pattern(inductor="recomputed")
def channel_softmax(x: Tensor, kind: Kind, upcast: Literal["fp32", "none"]) -> Tensor:
    # "fp32" comes first: of two forms that fit, the one that reads the narrow tensor.
    return normalised(x.float() if upcast == "fp32" else x, 1, kind)


def normalised(x, dim, kind):
    if kind == "difference":
        return x - torch.logsumexp(x, dim, keepdim=True)
    return torch.softmax(x, dim) if kind == "softmax" else torch.log_softmax(x, dim)


@channel_softmax.near_miss
def _(x, kind, upcast):
    """over another dimension"""
    return normalised(x, 2, kind)


@channel_softmax.near_miss
def _(x, kind, upcast):
    """over the samples"""
    return normalised(x, 0, kind)


@channel_softmax.guard
def _(x, kind, upcast):
    return reject_dtypes(x=x) or reject_channels_first(x=x)


@channel_softmax.worthwhile
def _(x, kind, upcast, training):
    return UNMEASURED


@channel_softmax.kernel
def _(x, kind, upcast):
    return forward(x, torch.float32 if upcast == "fp32" else x.dtype, kind)


@channel_softmax.backward(result=True)
def _(saved, dy):
    return (backward(dy, saved.result, saved.x.dtype, saved.kind),)


@channel_softmax.inputs(dict(b=2, c=12, n=5), dict(b=16, c=19, n=512))
def _(tensor, b, c, n):
    return tensor(b, c, n, n), "softmax", "none"
