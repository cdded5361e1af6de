"""A convolution with its bias, a residual and relu in one call of cuDNN, in inference:
relu(conv(x, weight) + bias + z).

x is `[b, c, h, w]`, weight `[o, c, p, q]`, bias `[o]` or missing; z, the residual, has the
result's shape, or is missing; all in fp32, bf16 or fp16. windows tells how the windows lie: "2,2
1,1 1,1 1" has stride, padding, dilation and groups. Plain Inductor has cuDNN write the convolution
and reads it again for what follows. In fp32 both use TF32 where torch.backends.cudnn allows it.
Source: torch.nn.functional.conv2d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Replacement
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.conv.library import convolution_relu, windows_of
from fusion_backend.kernels.conv.limits import (
    ONLY_INFERENCE,
    reject_residual,
    reject_settings,
    reject_vectors_of,
    worth_it,
)


@Pattern
def conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, windows: str
) -> Tensor:
    y = windows_of(windows).convolve(x, weight, bias)
    return F.relu(y if z is None else y + z).to(x.dtype)


@conv_relu.near_miss
def _(x, weight, bias, z, windows):
    """with an upper bound, too"""
    y = windows_of(windows).convolve(x, weight, bias)
    return F.hardtanh(y if z is None else y + z, 0.0, 0.5)


@conv_relu.near_miss
def _(x, weight, bias, z, windows):
    """transposed"""
    how = windows_of(windows)
    y = F.conv_transpose2d(x, weight.transpose(0, 1), bias, how.stride, how.padding)
    return F.relu(y if z is None else y + z)


@conv_relu.replacement
def _(x, weight, bias, z, windows, training):
    if training:
        return ONLY_INFERENCE
    return Replacement(conv_relu, (x, weight, bias, z, windows), {}, "one call of cuDNN")


@conv_relu.guard
def _(x, weight, bias, z, windows):
    return (
        reject_dtypes(x=x, weight=weight, bias=bias)
        or reject_vectors_of(weight.shape[0], bias=bias)
        or reject_residual(x, weight, z, windows)
        or reject_settings(x, windows)
    )


@conv_relu.worthwhile
def _(x, weight, bias, z, windows, training):
    return worth_it()


@conv_relu.kernel
def _(x, weight, bias, z, windows):
    return convolution_relu(x, weight, bias, z, windows)


@conv_relu.inputs(dict(b=2, c=6, n=9, o=5), dict(b=32, c=256, n=56, o=256))
def _(tensor, b, c, n, o, k=3, last=0):
    form = torch.channels_last if last else torch.contiguous_format
    x, z = (tensor(b, i, n, n).contiguous(memory_format=form) for i in (c, o))
    weight = tensor(o, c, k, k) * (c * k * k) ** -0.5
    return x, weight, tensor(o), z, f"1,1 {k // 2},{k // 2} 1,1 1"
