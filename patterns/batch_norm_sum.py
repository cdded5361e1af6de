"""The sum of two batch normalisations in training, as in a block of a residual network with a
projection beside it: y = act((x - mean) / sqrt(var + eps) · weight + bias + (z - z_mean) /
sqrt(z_var + z_eps) · z_weight + z_bias), with the mean and variance of each channel, dimension 1,
over the batch and all other dimensions.

x and z are `[b, c]` or `[b, c, ...]` in fp32, bf16 or fp16, laid out alike, their channels adjacent
in memory, as in channels-last tensors. Weights and biases are `[c]`, and may be in fp32 beside an x
in 16 bits. act is relu or nothing. Returns y, laid out as x, and mean, var, z_mean and z_var `[c]`
in fp32, from which the model computes its running statistics; a variance is divided by the number
of terms. Computed in fp32, and rounded once; the backward keeps x, z, the statistics and, behind
relu, y. Source: Ioffe and Szegedy 2015; He et al. 2015 for the block.
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
from fusion_backend.kernels.norm.batch_norm import reject_layout
from fusion_backend.kernels.norm.batch_norm_sum import backward, forward


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """mean and var."""
    x = x if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return mean, var


@Pattern(inductor="reduction")
def batch_norm_sum(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    z_weight: Tensor,
    z_bias: Tensor,
    eps: float,
    z_eps: float,
    act: Literal["identity", "relu"],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y + F.batch_norm(z, None, None, z_weight, z_bias, True, 0.0, z_eps)
    return activate(y, act), *statistics(x), *statistics(z)


@batch_norm_sum.near_miss
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act):
    """a difference"""
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y - F.batch_norm(z, None, None, z_weight, z_bias, True, 0.0, z_eps)
    return activate(y, act), *statistics(x), *statistics(z)


@batch_norm_sum.near_miss
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act):
    """an activation before the sum"""
    y = activate(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), "relu")
    y = y + F.batch_norm(z, None, None, z_weight, z_bias, True, 0.0, z_eps)
    return activate(y, act), *statistics(x), *statistics(z)


@batch_norm_sum.near_miss
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act):
    """the second variance divided by one less"""
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y + F.batch_norm(z, None, None, z_weight, z_bias, True, 0.0, z_eps)
    z32 = z if z.dtype == torch.float64 else z.float()
    z_var, z_mean = torch.var_mean(z32, [0, *range(2, z.dim())])
    return activate(y, act), *statistics(x), z_mean, z_var


@batch_norm_sum.guard
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act):
    vectors = dict(weight=weight, bias=bias, z_weight=z_weight, z_bias=z_bias)
    no = reject_dtypes(x=x, z=z) or reject_dtypes_of_vectors(x, **vectors)
    no = no or reject_dynamic(eps=eps, z_eps=z_eps) or reject_layout(x)
    if no is not None:
        return no
    if not same_layout(z, x):
        return Reject(f"z does not lie in memory as x does: {memory(z)}")
    return reject_vectors(x.shape[1], **vectors)


@batch_norm_sum.worthwhile
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act, training):
    return UNMEASURED


@batch_norm_sum.kernel
def _(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act):
    return forward(x, z, weight, bias, z_weight, z_bias, eps, z_eps, act)


@batch_norm_sum.backward(result=True, same={"z_bias": "bias"})
def _(saved, dy, dmean=None, dvar=None, dz_mean=None, dz_var=None):
    y, *moments = saved.result
    names = "x", "z", "weight", "bias", "z_weight", "z_bias"
    vectors = saved.weight, saved.bias, saved.z_weight, saved.z_bias
    return backward(
        dy, (dmean, dvar, dz_mean, dz_var), saved.x, saved.z, y if saved.act == "relu" else None,
        *vectors, tuple(moments), saved.eps, saved.z_eps, tuple(saved.needs[n] for n in names),
    )  # fmt: skip


@batch_norm_sum.inputs(dict(b=3, c=6, n=5), dict(b=128, c=256, n=56))
def _(tensor, b, c, n):
    x, z = (tensor(b, c, n, n).to(memory_format=torch.channels_last) for _ in range(2))
    return x, z, *(tensor(c) for _ in range(4)), 1e-5, 1e-5, "relu"
