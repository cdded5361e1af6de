"""Patch embedding: a convolution whose stride is the size of its kernel, so that no two windows
overlap.

x is `[b, c, ...]` with one to three spatial dimensions, weight `[o, c, ...]`, bias `[o]` or
missing; no padding, no dilation, no groups. Elements that do not fill a window at the end of a
dimension are left out. With x cut into windows, `[windows, c · p · q]`, it is one matrix product, y
= windows · weightᵀ + bias, and each of its gradients is another product. cuDNN computes it as a
convolution of few channels with large windows, which for ViT-L has a tenth of the product's speed
(an H200, bf16). Taken in bf16 and fp16. Source: Dosovitskiy et al. 2021.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels.common.inputs import dynamic
from fusion_backend.kernels.common.rows import UNMEASURED

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by the dimensions of x


@Pattern
def patch_embedding(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return CONVOLUTIONS[x.dim()](x, weight, bias, stride=tuple(weight.shape[2:]))


@patch_embedding.near_miss
def _(x, weight, bias):
    """windows that overlap"""
    return F.conv2d(x, weight, bias, stride=(weight.shape[2] - 1, weight.shape[3]))


@patch_embedding.near_miss
def _(x, weight, bias):
    """with padding"""
    return F.conv2d(x, weight, bias, stride=tuple(weight.shape[2:]), padding=1)


@patch_embedding.near_miss
def _(x, weight, bias):
    """with gaps between the pixels of a window"""
    return F.conv2d(x, weight, bias, stride=tuple(weight.shape[2:]), dilation=2)


@patch_embedding.replacement
def _(x, weight, bias):
    why = "one matrix product: its windows do not overlap"
    otherwise = "the convolution stays"
    return Replacement(windows_times_weight, (x, weight, bias), {}, why, otherwise)


@Op
def windows_times_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The result has the memory layout of the product, channels last."""
    out, *_ = weight.shape
    windows, counts = windows_of(x, tuple(weight.shape[2:]))
    y = F.linear(windows, weight.reshape(out, -1), bias)
    return y.view(x.shape[0], *counts, out).movedim(-1, 1)


def windows_of(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """`[windows, c · p · q]` and how many windows there are in each dimension."""
    counts = [n // size for n, size in zip(x.shape[2:], sizes, strict=True)]
    for i, (count, size) in enumerate(zip(counts, sizes, strict=True), 2):
        x = x.narrow(i, 0, count * size)
    x = x.reshape(*x.shape[:2], *(n for pair in zip(counts, sizes, strict=True) for n in pair))
    places = [2 + 2 * i for i in range(len(sizes))]
    x = x.permute(0, *places, 1, *(i + 1 for i in places))
    return x.reshape(-1, math.prod(x.shape[len(sizes) + 1 :])), counts


@windows_times_weight.guard
def _(x, weight, bias):
    # cutting it would guard on what divides what
    if any(dynamic(n) for n in (*x.shape[1:], *weight.shape)):
        return Reject("a size other than that of the batch is dynamic")
    if 0 in (*x.shape[1:], *weight.shape):
        return Reject("x or weight is empty")


@windows_times_weight.worthwhile
def _(x, weight, bias, training):
    if x.itemsize != 2:
        return Reject("of fp32, cuDNN's convolution may use TF32 where a product may not")
    rows = (x.shape[-2] * x.shape[-1], x.shape[-1], 1)
    if x.dim() != 4 or x.stride()[1:] != rows or x.shape[1] > 16:
        return UNMEASURED
    if weight.shape[0] < 768 or statically_known_true(x.numel() < 3 * 224 * 224):
        return UNMEASURED


@patch_embedding.inputs(dict(b=2, c=3, n=11, p=4, o=10), dict(b=128, c=3, n=224, p=16, o=1024))
def _(tensor, b, c, n, p, o):
    return tensor(b, c, n, n), tensor(o, c, p, p) * (c * p * p) ** -0.5, tensor(o)
