"""A convolution of images of at most four channels, as at the start of a network: y = conv2d(x,
weight, bias).

x is `[b, c, h, w]` with c at most 4, weight `[o, c, p, q]`, bias `[o]` or missing, all of one
dtype, bf16 or fp16; in fp32 it is not found, because cuDNN may use TF32. windows tells how the
windows lie: "2,2 3,3 1,1 1" has stride, padding, dilation and groups; there is no dilation, and
there are no groups. With " last" behind them y is channels-last; otherwise it lies in memory as
torch lays it out. Products are added up in fp32. The gradients of weight and bias are of their
dtype, with sums in fp32; that of x is computed by cuDNN. The kernels read x as it lies in memory.
cuDNN pads the channels in memory, and takes 17 times as long as moving the bytes for windows of
7 × 7 pixels (an H200, bf16, benchmarks/results/h200-stems-and-sums.json). Source:
torch.nn.functional.conv2d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, reject_dtypes, reject_vectors
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.conv.pixels import (
    CHANNELS,
    LONGEST,
    described,
    forward,
    in_planes,
    like,
    padded_window,
    weight_gradient,
)


@Pattern
def image_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, windows: str) -> Tensor:
    # a convolution of the user's is conv2d, and is taken for this one where it has few channels
    # (ir/rules_conv.py)
    (stride, padding, dilation, groups), last = described(windows)
    y = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)
    return y.contiguous(memory_format=torch.channels_last) if last else y


@image_convolution.near_miss
def _(x, weight, bias, windows):
    """transposed"""
    how, _ = described(windows)
    return F.conv_transpose2d(x, weight.transpose(0, 1), bias, how.stride, how.padding)


@image_convolution.near_miss
def _(x, weight, bias, windows):
    """of more channels"""
    x, weight = torch.cat([x, x], 1), torch.cat([weight, weight], 1)
    return described(windows)[0].convolve(x, weight, bias)


@image_convolution.guard
def _(x, weight, bias, windows):
    (how, _), (o, c, p, q) = described(windows), weight.shape
    no = reject_dtypes(x=x, weight=weight, bias=bias) or reject_vectors(weight.shape[0], bias=bias)
    if no is not None:
        return no
    if any(map(dynamic, (*x.shape[1:], *weight.shape, *x.stride()[1:]))):
        return Reject("a size other than that of the batch is dynamic")
    if c > CHANNELS or how.groups != 1 or how.dilation != [1, 1]:
        return Reject(f"it takes up to {CHANNELS} channels, without groups and without dilation")
    if padded_window(weight) > LONGEST:
        return Reject(f"a window of {p} × {q} pixels with {c} channels is too large for its kernel")
    if 0 in (*x.shape[1:], o):
        return Reject("x or weight is empty")


@image_convolution.worthwhile
def _(x, weight, bias, windows, training):
    return UNMEASURED


@image_convolution.kernel
def _(x, weight, bias, windows):
    how, last = described(windows)
    return forward(x, weight, bias, how, not last and in_planes(x, weight))


@image_convolution.backward()
def _(saved, dy):
    x, weight, needs, (how, _) = saved.x, saved.weight, saved.needs, described(saved.windows)
    dx = dweight = None
    if needs["x"]:
        stride, padding, dilation, groups = how
        dx, _, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups,
            [True, False, False],
        )  # fmt: skip
    if needs["weight"]:
        dweight = like(weight, weight_gradient(dy, x, weight, how))
    dbias = dy.sum((0, 2, 3), dtype=torch.float32).to(dy.dtype) if needs["bias"] else None
    return dx, dweight, dbias


@image_convolution.inputs(dict(b=2, c=3, n=11, p=3, o=10), dict(b=128, c=3, n=224, p=7, o=64))
def _(tensor, b, c, n, p, o, last=0):
    form = torch.channels_last if last else torch.contiguous_format
    x = tensor(b, c, n, n).contiguous(memory_format=form)
    weight = tensor(o, c, p, p) * (c * p * p) ** -0.5
    return x, weight, tensor(o), f"2,2 {p // 2},{p // 2} 1,1 1"
