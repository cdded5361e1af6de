"""A convolution with batch normalisation, a residual and relu in one call of cuDNN, in inference:
relu((conv(x, weight) + bias - mean) / sqrt(var + eps) · gain + shift + z).

x is `[b, c, h, w]`, weight `[o, c, p, q]`; bias, mean, var, gain and shift are `[o]`, in
fp32, bf16 or fp16, where bias, gain and shift may be missing; z, the residual, has the result's
shape, or is missing; windows is that of conv_relu.

The batch norm is folded into weight and bias at each call, in fp32; Inductor does so in the kernel
that lays out the weight for the convolution. The folded weight is rounded to the dtype of x, as the
weight is without this pattern: an fp32 weight by the tensor cores, where TF32 is on, and under
autocast by a cast, which is left out here. A weight in 16 bits would be rounded a second time,
which shows where the products of a pixel cancel, and fp16 may not hold a folded weight. Such batch
norms are left alone. Source: Ioffe and Szegedy 2015, torch.nn.functional.batch_norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels import reject_dtypes, reject_dynamic
from fusion_backend.kernels.conv.library import convolution_relu, windows_of
from fusion_backend.kernels.conv.limits import (
    ONLY_INFERENCE,
    reject_residual,
    reject_settings,
    reject_vectors_of,
    worth_it,
)


@Pattern
def conv_batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    eps: float,
    z: Tensor | None,
    windows: str,
) -> Tensor:
    y = windows_of(windows).convolve(x, weight, bias)
    y = F.batch_norm(y, mean.detach(), var.detach(), gain, shift, False, 0.0, eps)
    return F.relu(y if z is None else y + z).to(x.dtype)


@conv_batch_norm_relu.near_miss
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows):
    """in training, with the statistics of the batch"""
    y = windows_of(windows).convolve(x, weight, bias)
    y = F.batch_norm(y, None, None, gain, shift, True, 0.0, eps)
    return F.relu(y if z is None else y + z)


@conv_batch_norm_relu.near_miss
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows):
    """with an upper bound, too"""
    y = windows_of(windows).convolve(x, weight, bias)
    y = F.batch_norm(y, mean.detach(), var.detach(), gain, shift, False, 0.0, eps)
    return F.hardtanh(y if z is None else y + z, 0.0, 0.5)


@conv_batch_norm_relu.replacement(asks={"weight": "before_rounding"})
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows, known, training):
    if training:
        return ONLY_INFERENCE
    exact = weight if weight.dtype == torch.float32 else known["weight"]
    if isinstance(exact, Reject):
        return exact
    given = (x, exact, bias, mean, var, gain, shift, eps, z, windows)
    return Replacement(folded_conv_relu, given, {}, "one call of cuDNN", "the convolution stays")


@Op
def folded_conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    eps: float,
    z: Tensor | None,
    windows: str,
) -> Tensor:
    """The weight is in fp32, whatever the dtype of x."""
    rest = bias, mean, var, gain, shift, eps, z, windows
    return conv_batch_norm_relu.reference(x, weight.to(x.dtype), *rest)


@folded_conv_relu.guard
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows):
    if weight.dtype != torch.float32:
        return Reject(f"weight is {weight.dtype}: it would be rounded a second time")
    if x.dtype == torch.float16:
        return Reject("a weight with a batch norm in it may be too large or too small for fp16")
    vectors = dict(bias=bias, mean=mean, var=var, gain=gain, shift=shift)
    given = {name: t for name, t in dict(vectors, x=x).items() if t is not None}
    return (
        next(filter(None, (reject_dtypes(**{name: t}) for name, t in given.items())), None)
        or reject_vectors_of(weight.shape[0], **vectors)
        or reject_dynamic(eps=eps)
        or reject_residual(x, weight, z, windows)
        or reject_settings(x, windows)
    )


@folded_conv_relu.worthwhile
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows, training):
    return worth_it()


@folded_conv_relu.kernel
def _(x, weight, bias, mean, var, gain, shift, eps, z, windows):
    weight, bias = folded(weight, bias, mean, var, gain, shift, eps)
    return convolution_relu(x, weight.to(x.dtype), bias.to(x.dtype), z, windows)


def folded(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The weight and the bias, in fp32, of the convolution that contains the batch norm."""
    scale = torch.rsqrt(var.float() + eps)
    scale = scale if gain is None else scale * gain.float()
    moved = (-mean.float() if bias is None else bias.float() - mean.float()) * scale
    return weight.float() * scale.view(-1, 1, 1, 1), moved if shift is None else moved + shift


def example(tensor, b, c, n, o, k=3, last=0):
    form = torch.channels_last if last else torch.contiguous_format
    x, z = (tensor(b, i, n, n).contiguous(memory_format=form) for i in (c, o))
    weight = tensor(o, c, k, k) * (c * k * k) ** -0.5
    statistics = tensor(o), tensor(o).square() + 0.5, tensor(o), tensor(o), 1e-5
    return x, weight, tensor(o), *statistics, z, f"1,1 {k // 2},{k // 2} 1,1 1"


conv_batch_norm_relu.inputs(dict(b=2, c=6, n=9, o=5), dict(b=32, c=256, n=56, o=256))(example)
folded_conv_relu.inputs(dict(b=2, c=6, n=9, o=5), dict(b=32, c=256, n=56, o=256))(example)
