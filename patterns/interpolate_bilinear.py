"""Bilinear interpolation of images to another size, as in segmentation, feature pyramids and
decoders.

x is `[n, c, h, w]`, contiguous, or channels-last with 16 channels or more, in fp32, bf16 or fp16;
the result has its dtype and memory format. target is the size of the result and where the corners
lie: "512,512", or "512,512 align_corners". A scale factor is taken if it is the quotient of the
sizes. Computed in fp32. Each element of the gradient is added up by the program that writes it;
Inductor adds every term to memory by an atomic operation, in the dtype of x. Compiled code keeps
nothing for the backward. Source: torch.nn.functional.interpolate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.images.bilinear import backward, forward, target_of
from fusion_backend.kernels.images.tiles import channels_last, lies_otherwise, reject_images


@Pattern
def interpolate_bilinear(x: Tensor, target: str) -> Tensor:
    height, width, corners = target_of(target)
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=corners)


@interpolate_bilinear.near_miss
def _(x, target):
    """the nearest pixel"""
    height, width, _ = target_of(target)
    return F.interpolate(x, (height, width), mode="nearest")


@interpolate_bilinear.near_miss
def _(x, target):
    """cubic"""
    height, width, corners = target_of(target)
    return F.interpolate(x, (height, width), mode="bicubic", align_corners=corners)


@interpolate_bilinear.near_miss
def _(x, target):
    """means of the pixels that an output covers"""
    height, width, _ = target_of(target)
    return F.interpolate(x, (height, width), mode="area")


@interpolate_bilinear.guard
def _(x, target):
    height, width, _ = target_of(target)
    if (no := reject_images(x, height, width)) is not None:
        return no
    if channels_last(x) and x.shape[1] < 16:
        return Reject("x is channels-last, and torch's result of fewer than 16 channels contiguous")


@interpolate_bilinear.neighbours
def _(around, training):
    if not training and around.laid_out_by:
        return lies_otherwise(around.laid_out_by)


@interpolate_bilinear.worthwhile
def _(x, target, training):
    return UNMEASURED


@interpolate_bilinear.kernel
def _(x, target):
    return forward(x, target)


@interpolate_bilinear.backward
def _(saved, dy):
    return (backward(dy, saved.x, saved.target),)


@interpolate_bilinear.inputs(dict(b=2, c=3, n=5, size=12), dict(b=8, c=21, n=64, size=512))
def _(tensor, b, c, n, size, last=0, corners=0):
    x = tensor(b, c, n, n)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x, f"{size},{size}" + corners * " align_corners"
