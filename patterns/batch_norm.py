"""Batch normalisation in inference: act((x - mean) / sqrt(var + eps) · weight + bias), over
dimension 1.

x is `[b, c, ...]`, dense or channels-last, in fp32, bf16 or fp16; mean and var `[c]`, which have no
gradient, weight and bias `[c]`, which may be missing, may have another of these dtypes. act is relu
or nothing. Computed in fp32. Source: Ioffe and Szegedy 2015, torch.nn.functional.batch_norm.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import reject_dtypes, reject_dynamic, reject_vectors
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.channels import Affine, forward, reject_channels


@Pattern(inductor="pointwise")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: Literal["identity", "relu"],
) -> Tensor:
    return activate(
        F.batch_norm(x, mean.detach(), var.detach(), weight, bias, False, 0.0, eps), act
    )


@batch_norm.near_miss
def _(x, mean, var, weight, bias, eps, act):
    """in training, with the statistics of the batch"""
    return activate(F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), act)


@batch_norm.guard
def _(x, mean, var, weight, bias, eps, act):
    vectors = dict(mean=mean, var=var, weight=weight, bias=bias)
    other = (reject_dtypes(**{name: t}) for name, t in vectors.items() if t is not None)
    return (
        reject_dtypes(x=x)
        or next(filter(None, other), None)
        or reject_vectors(x.shape[1], **vectors)
        or reject_channels(x, 1)
        or reject_dynamic(eps=eps)
    )


@batch_norm.neighbours
def _(around, training):
    if around.convolutions:
        beside = around.convolutions[0]
        return Reject(
            f"it would decide the layout of {beside} beside it: timed at 0.78 to 0.98 of Inductor "
            "on an H200"
        )


@batch_norm.worthwhile
def _(x, mean, var, weight, bias, eps, act, training):
    if training or statically_known_true(x.numel() < 1 << 24):
        return UNMEASURED


@batch_norm.kernel
def _(x, mean, var, weight, bias, eps, act):
    return forward(x, 1, Affine(mean, var, weight, bias, eps), act)


@batch_norm.inputs(dict(b=3, c=6, n=5), dict(b=64, c=256, n=56))
def _(tensor, b, c, n):
    return (
        tensor(b, c, n, n),
        tensor(c),
        tensor(c).square() + 0.5,
        tensor(c),
        tensor(c),
        1e-5,
        "identity",
    )
