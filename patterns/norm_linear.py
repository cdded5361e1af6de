"""Normalisation, then one linear layer: norm(x) W + b, where norm is layer normalisation or RMS
normalisation.

x is `[..., k]`, weight and bias `[k]`, W `[k, n]` with any strides, b `[n]`; both biases may be
missing.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes, reject_dynamic


@Pattern
def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    w: Tensor,
    b: Tensor | None,
    norm: Literal["layer", "rms"],
) -> Tensor:
    if norm == "rms" and bias is not None:
        raise ValueError("RMS normalisation has no bias")
    shape = x.shape[-1:]
    y = (
        F.layer_norm(x, shape, weight, bias, eps)
        if norm == "layer"
        else F.rms_norm(x, shape, weight, eps)
    )
    y = y.to(w.dtype)  # autocast normalises in fp32 and multiplies in bf16
    return y @ w if b is None else y @ w + b


@norm_linear.near_miss
def _(x, weight, bias, eps, w, b, norm):
    """the normalisation afterwards"""
    return F.layer_norm(x @ w, w.shape[1:], None, b, eps)


@norm_linear.guard
def _(x, weight, bias, eps, w, b, norm):
    return reject_dtypes(x=x, weight=weight, bias=bias, w=w, b=b) or reject_dynamic(eps=eps)


@norm_linear.inputs(dict(m=5, k=33, n=17), dict(m=16384, k=1024, n=4096))
def _(tensor, m, k, n):
    return tensor(m, k), tensor(k), tensor(k), 1e-5, tensor(k, n), tensor(n), "layer"
