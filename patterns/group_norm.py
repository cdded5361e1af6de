"""Group normalisation: act(group_norm(x, groups) · weight + bias) over groups of channels in
dimension 1.

x is `[b, c, ...]`, dense in this order or channels-last, in fp32, bf16 or fp16, a group of it up to
1048576 elements long; the result is laid out as x. weight and bias `[c]` may be missing, and may be
in fp32 beside an x in 16 bits; then the result is in fp32. act is silu or nothing. Computed in
fp32; backward keeps x and the mean and rstd of each group. Source: Wu and He 2018,
torch.nn.functional.group_norm.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, reject_dynamic, reject_vectors
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.inputs import (
    common_dtype,
    dense,
    memory,
    reject_dtypes_of_vectors,
)
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.group_norm import forward, size_of
from fusion_backend.kernels.norm.group_norm_backward import backward
from fusion_backend.kernels.norm.group_norm_rows import channels_last
from fusion_backend.kernels.norm.group_norm_rows import forward as forward_of_rows
from fusion_backend.kernels.norm.group_norm_rows_backward import backward as backward_of_rows

MAX_GROUP = 1 << 20  # elements of the largest group accepted
MAX_SAMPLE = (1 << 31) - 1  # and of the largest sample, channels-last: places in it have 32 bits


@Pattern(inductor="reduction")
def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: Literal["identity", "silu"],
) -> Tensor:
    alone = weight is None and bias is not None  # torch has no gradient then
    x = x.to(common_dtype(x, weight, bias))
    y = F.group_norm(x, groups, weight, None if alone else bias, eps)
    return activate(y + bias.reshape(-1, *[1] * (x.dim() - 2)) if alone else y, act)


@group_norm.near_miss
def _(x, groups, weight, bias, eps, act):
    """of every channel, over the batch"""
    return activate(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), act)


@group_norm.near_miss
def _(x, groups, weight, bias, eps, act):
    """of every instance and channel, with given statistics"""
    given = [torch.full(x.shape[1:2], number, dtype=x.dtype, device=x.device) for number in (0, 2)]
    return activate(F.instance_norm(x, *given, weight, bias, False, 0.0, eps), act)


@group_norm.guard
def _(x, groups, weight, bias, eps, act):
    no = reject_dtypes_of_vectors(x, weight=weight, bias=bias)
    no = no or reject_dynamic(groups=groups, eps=eps)
    if no or any(map(dynamic, x.shape[1:])):
        return no or Reject("the number of channels or the size of a plane is dynamic")
    if not dense(x, range(x.dim())) and not channels_last(x):
        return Reject(f"x is dense neither in its own order nor channels-last: {memory(x)}")
    if channels_last(x) and size_of(x, 1) > MAX_SAMPLE:
        return Reject(f"a sample of {size_of(x, 1)} elements is larger than {MAX_SAMPLE}")
    if not 1 <= size_of(x, groups) <= MAX_GROUP:
        return Reject(f"a group of {size_of(x, groups)} elements is not between 1 and {MAX_GROUP}")
    return reject_vectors(x.shape[1], weight=weight, bias=bias)


@group_norm.neighbours
def _(around, training):
    if training and "gelu" in around.makers:
        return Reject(
            "Inductor computes the gelu in front of it in the same kernels: timed at 0.84 of it "
            "on an H200"
        )


@group_norm.worthwhile
def _(x, groups, weight, bias, eps, act, training):
    if common_dtype(x, weight, bias) != x.dtype or channels_last(x):
        return UNMEASURED  # the latter was timed alone only, not next to code that Inductor fuses
    if groups == x.shape[1]:
        return Reject(
            "each channel is a group, as in instance_norm: timed at 0.74 to 1.00 of Inductor on an "
            "H100 in inference, and not in training"
        )
    if statically_known_true(x.numel() < 1 << 23):
        return UNMEASURED


@group_norm.kernel(saves=("mean", "rstd"))
def _(x, groups, weight, bias, eps, act, save, result_dtype):
    run = forward_of_rows if channels_last(x) else forward
    return run(x, groups, weight, bias, eps, act, save, dtype=result_dtype)


@group_norm.saved
def _(x, groups, weight, bias, eps, act):
    """Without a view that a channels-last tensor does not have, and would be copied for."""
    x = x.unflatten(1, (groups, -1)).float()
    of_group = tuple(range(2, x.dim()))
    mean = x.mean(of_group, keepdim=True)
    rstd = torch.rsqrt((x - mean).pow(2).mean(of_group) + eps)
    return mean.flatten(), rstd.flatten()


@group_norm.backward
def _(saved, dy):
    needs = [saved.needs[name] for name in ("x", "weight", "bias")]
    args = saved.x, saved.groups, saved.weight, saved.bias, saved.mean, saved.rstd, saved.act
    run = backward_of_rows if channels_last(saved.x) else backward
    return run(dy, *args, needs)


@group_norm.inputs(dict(b=2, c=60, n=4, groups=2), dict(b=16, c=480, n=64, groups=32))
def _(tensor, b, c, n, groups, silu=0, channels_last=0):
    x, act = tensor(b, c, n, n), "silu" if silu else "identity"
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return x, groups, tensor(c), tensor(c), 1e-5, act
