"""Layer normalisation over the last dimension: (x - mean) / sqrt(var + eps) · weight + bias.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; weight and bias `[n]` may be
missing, and may be in fp32 beside an x in 16 bits; then the result is in fp32. An x `[b, t, n]`
that is a transposed view of signals `[b, n, t]` is read as these, and the result lies in memory as
x does; weight and bias then have its dtype. Sums are taken in fp32. Source: Ba et al. 2016,
torch.nn.functional.layer_norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import BackwardOnly, Pattern, Reject
from fusion_backend.kernels import (
    number,
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_vectors,
)
from fusion_backend.kernels.common.channel_tiles import reject_channels_first
from fusion_backend.kernels.common.inputs import common_dtype, reject_dtypes_of_vectors
from fusion_backend.kernels.common.rows import FEW, RESULTS, UNMEASURED
from fusion_backend.kernels.norm.backward import backward
from fusion_backend.kernels.norm.channel_norm import ChannelNorm, channels_of_rows
from fusion_backend.kernels.norm.channel_norm import forward as forward_of_channels
from fusion_backend.kernels.norm.channel_norm_backward import backward as backward_of_channels
from fusion_backend.kernels.norm.forward import Norm, forward, small_in_fp32


@Pattern(inductor="reduction")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.to(common_dtype(x, weight, bias)), x.shape[-1:], weight, bias, eps)


def affine(y, weight, bias):
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@layer_norm.spelling
def _(x, weight, bias, eps):
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
    return affine(y, weight, bias)


@layer_norm.near_miss
def _(x, weight, bias, eps):
    """the unbiased variance"""
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + eps)
    return affine(y, weight, bias)


@layer_norm.near_miss
def _(x, weight, bias, eps):
    """eps outside the root"""
    y = (x - x.mean(-1, keepdim=True)) / (torch.sqrt(x.var(-1, unbiased=False, keepdim=True)) + eps)
    return affine(y, weight, bias)


@layer_norm.guard
def _(x, weight, bias, eps):
    if (first := channels_of_rows(x)) is not None:
        no = reject_channels_first(x=first) or reject_dtypes(x=x, weight=weight, bias=bias)
    else:
        no = reject_rows(x)
    return (
        no
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes_of_vectors(x, weight=weight, bias=bias)
        or reject_dynamic(eps=eps)
    )


@layer_norm.worthwhile
def _(x, weight, bias, eps, training):
    timed = common_dtype(x, weight, bias) == x.dtype and channels_of_rows(x) is None
    if not timed or statically_known_true(x.numel() < 1 << 17):
        return UNMEASURED
    if no := small_in_fp32(x, training):
        return no
    # in training Inductor's before our backward was slower
    if x.element_size() == 4 and not training:
        return Reject(f"Inductor's forward is as fast in fp32 ({RESULTS})")
    few = statically_known_true(x.numel() < FEW * number(x.shape[-1]))
    if x.element_size() == 2 and 12288 < number(x.shape[-1]) <= 16384 and not few:
        return BackwardOnly(f"Inductor's forward is faster for rows of 24 to 32 KB ({RESULTS})")


@layer_norm.kernel(saves=("mean", "rstd"))
def _(x, weight, bias, eps, save, result_dtype):
    if (first := channels_of_rows(x)) is not None:
        y = forward_of_channels(first, ChannelNorm(weight, bias, eps, "layer")).transpose(1, 2)
        nothing = (x.new_empty(0, dtype=torch.float32) for _ in range(2))
        return y if result_dtype is None else y.to(result_dtype), *nothing
    norm = Norm(weight, bias, None, eps, True)
    y, _, mean, rstd = forward(x, None, norm, save, dtype=result_dtype)
    return y, mean, rstd


@layer_norm.saved
def _(x, weight, bias, eps):
    """Operator for operator as in the forward, so that nothing is computed twice."""
    _, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
    return mean.reshape(-1), rstd.reshape(-1)


@layer_norm.backward
def _(saved, dy):
    needs = [saved.needs[name] for name in ("x", "weight", "bias")]
    if (first := channels_of_rows(saved.x)) is not None:
        norm = ChannelNorm(saved.weight, saved.bias, saved.eps, "layer")
        dx, dw, db = backward_of_channels(dy.transpose(1, 2), first, norm, tuple(needs))
        return dx if dx is None else dx.transpose(1, 2), dw, db
    norm = Norm(saved.weight, saved.bias, None, saved.eps, True)
    return backward(dy, None, saved.x, saved.mean, saved.rstd, norm, needs)


@layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), tensor(n), 1e-5
