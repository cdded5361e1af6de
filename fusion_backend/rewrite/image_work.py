"""What the layout of a graph's images decides the time of."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusion_backend.capture.sizes import is_dense

LAST = torch.channels_last
CONVOLUTIONS = {"conv2d", "conv_transpose2d"}  # of images; Inductor lays out no others


class Convolution(NamedTuple):
    """The sizes of its tensors, whether there is a bias, the other arguments of aten.convolution
    (stride, padding, dilation, transposed, output padding, groups), the dtype in which it is
    computed, and whether the image, the weight and the bias get gradients.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool
    how: tuple
    dtype: torch.dtype
    needs: tuple[bool, bool, bool]


class Copying(NamedTuple):
    """The sizes and dtype of a tensor, and its strides before and after it is laid out."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    before: tuple[int, ...]
    after: tuple[int, ...]


class Work(NamedTuple):
    """What takes other times in channels-last: the convolutions of a graph, and the tensors that
    are copied at its edges, once more for the gradient; each with how many there are.
    """

    device: torch.device
    convolutions: Counter[Convolution]
    copies: Counter[Copying]


def work_of(
    gm: fx.GraphModule, calls: list[tuple[tuple, Tensor]], laid: list[tuple[Tensor, Tensor]]
) -> Work:
    """The work of a graph. calls: the arguments and results of its convolutions; laid: what is laid
    out at its edges, before and after.
    """
    found: Counter[Convolution] = Counter()
    devices = set()
    for n, (args, _) in zip(filter(is_convolution, gm.graph.nodes), calls, strict=True):
        x, weight, bias, *how = args
        given = dict(zip(("input", "weight", "bias"), n.args, strict=False)) | n.kwargs
        own = [value_of(given.get(name)) for name in ("input", "weight", "bias")]
        if any(is_dense(t) and t.dim() == 4 and in_last(t) for t in own[:2]):
            continue  # it is channels-last as it is
        trains = value_of(n).requires_grad
        needs = tuple(trains and getattr(t, "requires_grad", False) for t in own)
        sizes = tuple(x.shape), tuple(weight.shape), bias is not None
        how = tuple(tuple(a) if isinstance(a, list) else a for a in how)
        found[Convolution(*sizes, how, value_of(n).dtype, needs)] += 1
        devices.add(x.device)
    (device,) = devices
    copies: Counter[Copying] = Counter()
    for source, target in laid:
        strides = source.stride(), target.stride()
        copies[Copying(tuple(target.shape), target.dtype, *strides)] += 1 + source.requires_grad
    return Work(device, found, copies)


def is_convolution(n: fx.Node) -> bool:
    return n.op == "call_function" and getattr(n.target, "__name__", "") in CONVOLUTIONS


def value_of(n) -> object:
    return n.meta.get("example_value") if isinstance(n, fx.Node) else None


def in_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=LAST) and not t.is_contiguous()
