"""Rules of convolutions: those that are one matrix product, and all others of two dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_backend.capture.sizes import equals, same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.operator_families import aten
from fusion_backend.ir.rules import rule
from fusion_backend.ir.rules_batch_norm import present
from fusion_backend.ir.schema_args import Call

Sizes = int | Sequence[int]
HALVES = {torch.bfloat16, torch.float16}
FEW = 4  # channels


@rule(*aten("conv1d", "conv2d", "conv3d"))
def convolution(
    c: Builder,
    call: Call,
    input: Expr,
    weight: Expr,
    bias: Expr | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
):
    """Convolutions whose windows lie side by side, and others of two dimensions, whose stride,
    padding, dilation and groups are written as one text (`windows_of`). The rest is left unchanged,
    and so is a convolution that is not of a batch.
    """
    kernel = tuple(weight.shape[2:])
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)

    def each(sizes: Sizes) -> tuple:
        sizes = tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes,)
        return sizes * (len(kernel) // len(sizes))

    if len(input.shape) != len(weight.shape):
        return None
    if isinstance(padding, str):
        if padding != "valid":
            return None
        padding = 0
    strides, margins, gaps = each(stride), each(padding), each(dilation)
    side_by_side = same(strides, kernel) and same(gaps, ones) and same(margins, zeros)
    if side_by_side and not same(kernel, ones) and equals(groups, 1):
        return present(c, "aten.conv.patches", [input, weight, bias], call.shape)
    numbers = (*strides, *margins, *gaps, groups)
    if len(kernel) != 2 or not all(isinstance(number, int) for number in numbers):
        return None
    windows, name = windows_of(strides, margins, gaps, groups), "aten.conv.windows"
    channels = input.shape[1]
    few = isinstance(channels, int) and 0 < channels <= FEW and groups == 1 and same(gaps, ones)
    if few and call.dtype in HALVES:
        name = "aten.conv.pixels"
        # The image that a site reads may lie otherwise than the one that this operator reads.
        windows += " last" if is_channels_last(call.value) else ""
    return present(c, name, [input, weight, bias, c.word(windows)], call.shape)


@rule("aten::convolution")
def any_convolution(
    c: Builder,
    call: Call,
    input: Expr,
    weight: Expr,
    bias: Expr | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
):
    """A pattern writes the convolution of images of a few channels like this; graphs of users have
    the operator that is nearer to their code.
    """
    if transposed:
        return None
    windows = c.word(windows_of(stride, padding, dilation, groups))
    return present(c, "aten.conv.pixels", [input, weight, bias, windows], call.shape)


def is_channels_last(t: torch.Tensor) -> bool:
    outs = t.shape[1]
    return isinstance(outs, int) and outs > 1 and equals(t.stride(1), 1)


def windows_of(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int):
    """The text that tells how a convolution's windows lie, such as "2,2 1,1 1,1 1"."""
    return " ".join(",".join(map(str, sizes)) for sizes in (stride, padding, dilation, [groups]))
