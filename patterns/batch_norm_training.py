"""Batch normalisation in training: y = act((x - mean) / sqrt(var + eps) · weight + bias +
residual), with the mean and variance of each channel, dimension 1, over the batch and all other
dimensions.

x is `[b, c]` or `[b, c, ...]` in fp32, bf16 or fp16, its channels adjacent in memory, as in
channels-last tensors; residual is like x, and may be missing. Weight and bias `[c]` may be missing,
too, and may be in fp32 beside an x in 16 bits. act is relu, relu6, silu, hardswish or nothing; with
a residual it is relu or nothing. Returns y, laid out as x, and mean and var `[c]` in fp32, from
which the model computes its running statistics; var is divided by the number of terms. Computed in
fp32; the backward keeps x, mean and var, and with a residual in front of relu y. Source: Ioffe and
Szegedy 2015, torch.nn.functional.batch_norm.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import reject_dtypes, reject_dynamic, reject_vectors
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.inputs import (
    memory,
    reject_dtypes_of_vectors,
    same_layout,
)
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.batch_norm import forward, reject_layout
from fusion_backend.kernels.norm.batch_norm_backward import backward


@Pattern(inductor="reduction")
def batch_norm_training(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: Literal["identity", "relu", "relu6", "silu", "hardswish"],
) -> tuple[Tensor, Tensor, Tensor]:
    if residual is not None and act not in ("identity", "relu"):
        raise ValueError("its gradient would need the residual")
    alone = weight is None and bias is not None  # torch has no gradient then, on a GPU
    y = F.batch_norm(x, None, None, weight, None if alone else bias, True, 0.0, eps)
    y = y + bias.reshape(-1, *[1] * (x.dim() - 2)).to(x.dtype) if alone else y
    y = y if residual is None else y + residual
    x = x if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return activate(y, act), mean, var


@batch_norm_training.near_miss
def _(x, residual, weight, bias, eps, act):
    """of every sample, not of the batch"""
    x32 = x if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(x32, [0, *range(2, x.dim())], correction=0)
    y = F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)
    return activate(y if residual is None else y + residual, act), mean, var


@batch_norm_training.near_miss
def _(x, residual, weight, bias, eps, act):
    """the variance divided by one less"""
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    x = x if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())])
    return activate(y if residual is None else y + residual, act), mean, var


@batch_norm_training.guard
def _(x, residual, weight, bias, eps, act):
    vectors = dict(weight=weight, bias=bias)
    no = reject_dtypes(x=x, residual=residual) or reject_dtypes_of_vectors(x, **vectors)
    no = no or reject_dynamic(eps=eps) or reject_layout(x)
    if no is not None:
        return no
    if residual is not None and not same_layout(residual, x):
        return Reject(f"the residual does not lie in memory as x does: {memory(residual)}")
    return reject_vectors(x.shape[1], **vectors)


@batch_norm_training.worthwhile
def _(x, residual, weight, bias, eps, act, training):
    return UNMEASURED


@batch_norm_training.kernel
def _(x, residual, weight, bias, eps, act):
    return forward(x, residual, weight, bias, eps, act)


@batch_norm_training.backward(result=True, same={"residual": 0})
def _(saved, dy, dmean=None, dvar=None):
    y, mean, var = saved.result
    needs = tuple(saved.needs[name] for name in ("x", "residual", "weight", "bias"))
    masked = saved.residual is not None and saved.act == "relu"
    vectors = saved.weight, saved.bias, mean, var
    return backward(
        dy, dmean, dvar, saved.x, y if masked else None, *vectors, saved.eps, saved.act, needs
    )


@batch_norm_training.inputs(dict(b=3, c=6, n=5), dict(b=128, c=256, n=56))
def _(tensor, b, c, n, alone=0):
    """Without the residual if `alone`."""
    x, residual = (tensor(b, c, n, n).to(memory_format=torch.channels_last) for _ in range(2))
    return x, None if alone else residual, tensor(c), tensor(c), 1e-5, "relu"
