"""The largest element of each window of an image, with its gradient, as between the stages of
convolutional networks.

x is `[n, c, h, w]`, contiguous or channels-last, in fp32, bf16 or fp16; the result has its dtype
and memory format. windows has kernel, stride and padding: "3,3 2,2 1,1", or "3,3 2,2 1,1 ceil"
where the last windows may end outside of the image. A window has up to 127 elements and no gaps.
The backward keeps the place of each largest element in its window, in 8 bits. Taken in training
alone. Source: torch.nn.functional.max_pool2d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.images.max_pool import (
    ONLY_TRAINING,
    backward,
    forward,
    places_of,
    windows_of,
)
from fusion_backend.kernels.images.tiles import lies_otherwise, reject_images


@Pattern
def max_pool(x: Tensor, windows: str) -> Tensor:
    return windows_of(windows).pool(x)


@max_pool.near_miss
def _(x, windows):
    """means of the windows"""
    kernel, stride, padding, ceil = windows_of(windows)
    return F.avg_pool2d(x, kernel, stride, padding, ceil)


@max_pool.near_miss
def _(x, windows):
    """windows with gaps"""
    kernel, stride, padding, ceil = windows_of(windows)
    return F.max_pool2d(x, kernel, stride, padding, dilation=2, ceil_mode=ceil)


@max_pool.guard
def _(x, windows):
    of = windows_of(windows)
    if of.kernel[0] * of.kernel[1] > 127:
        return Reject(f"the windows have {of.kernel[0] * of.kernel[1]} elements, more than 127")
    return reject_images(x) or reject_images(x, *of.size(x))


@max_pool.neighbours
def _(around, training):
    if around.laid_out_by:
        return lies_otherwise(around.laid_out_by)


@max_pool.worthwhile
def _(x, windows, training):
    if not training:
        return ONLY_TRAINING
    return UNMEASURED


@max_pool.kernel(saves=("kept",))
def _(x, windows, save):
    return forward(x, windows, save)


@max_pool.saved
def _(x, windows):
    return places_of(x, windows)


@max_pool.backward
def _(saved, dy):
    return (backward(dy, saved.x, saved.kept, saved.windows),)


@max_pool.inputs(dict(b=2, c=3, n=7), dict(b=128, c=64, n=112))
def _(tensor, b, c, n, last=0, k=3):
    x = tensor(b, c, n, n)
    return x.to(memory_format=torch.channels_last) if last else x, f"{k},{k} 2,2 {k // 2},{k // 2}"
