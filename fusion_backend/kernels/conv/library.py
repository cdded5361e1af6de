"""`fusion_cudnn::convolution_relu`: a convolution, its bias, a tensor added to it and relu as one
call of cuDNN.

torch declares cuDNN's calls without a rule for fake tensors, so this is an operator of our own,
which no compiler opens up. Inductor hands it its tensors channels-last, as it does with its own
convolutions (compat/channels_last.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from fusion_backend.compat.channels_last import takes_channels_last
from fusion_backend.compat.torch import suggest_memory_format
from fusion_backend.reporting.report import warn_once

CHANNELS_LAST, cudnn = torch.channels_last, torch.backends.cudnn


class Windows(NamedTuple):
    """How the windows of a convolution of two dimensions lie."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self)


@functools.cache
def windows_of(text: str) -> Windows:
    """Read from "2,2 1,1 1,1 1": stride, padding, dilation and groups."""
    *sizes, groups = text.split()
    return Windows(*([int(n) for n in pair.split(",")] for pair in sizes), int(groups))


# An implementation of torch's dispatcher costs the host less at each call than a custom_op, whose
# checks and gradient nobody needs inside of our ops.
LIBRARY = Library("fusion_cudnn", "DEF")
LIBRARY.define(
    "convolution_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? z, str windows) -> Tensor"
)


def compute(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, windows: str
) -> Tensor:
    """relu(conv(x, weight) + bias + z), rounded once, in the memory layout of the convolution.

    x `[b, c, h, w]`, weight `[o, c, p, q]`, bias `[o]`, z of the result's shape, all of
    one dtype. Where the tensors are not on a GPU, plain torch computes it.
    """
    how = windows_of(windows)
    # as a convolution does, the settings are asked at each call
    wanted = x.is_cuda and cudnn.enabled and not deterministic()
    return (by_cudnn if wanted else by_torch)(x, weight, bias, z, how)


def deterministic() -> bool:
    """Must the results have the same bits each time? cuDNN does not promise it for its call."""
    return cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, how: Windows
) -> Tensor:
    y = how.convolve(x, weight, bias)
    return F.relu(y if z is None else y + z)


def by_cudnn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, how: Windows
) -> Tensor:
    """Plain torch where cuDNN has no kernel for these sizes."""
    try:
        y = one_call(x, weight, bias, z, how)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        warn_once("cuDNN", f"fusion: cuDNN has no convolution with relu here, torch runs: {error}")
        return by_torch(x, weight, bias, z, how)
    return y if in_channels_last(x, weight) else y.contiguous()


def one_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, how: Windows
) -> Tensor:
    x, weight = (t.contiguous(memory_format=CHANNELS_LAST) for t in (x, weight))
    if z is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *how)
    z = z.contiguous(memory_format=CHANNELS_LAST)
    return torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *how)


LIBRARY.impl("convolution_relu", compute, "CompositeExplicitAutograd")
convolution_relu = torch.ops.fusion_cudnn.convolution_relu.default
takes_channels_last(convolution_relu)


@torch.library.register_fake("fusion_cudnn::convolution_relu")
def _(x, weight, bias, z, windows):
    return windows_of(windows).convolve(x, weight, None)


def in_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Is the result of torch's convolution channels-last?"""
    return CHANNELS_LAST in map(suggest_memory_format, (x, weight))
