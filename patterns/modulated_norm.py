"""Normalisation of rows, modulated by a scale and a shift for each sample: norm(x) · (1 + scale) +
shift.

x is `[b, ..., n]` of at least three dimensions, its rows up to 8192 long; norm is the layer norm or
the RMS norm over the last dimension, weight and bias `[n]` may be missing, and an RMS norm has no
bias. scale and shift are `[b, 1, ..., n]`, one row for all tokens of a sample, or `[1, 1, ..., n]`;
shift may be missing. All are fp32, bf16 or fp16. Weight, bias and the result have the dtype of x;
scale and shift may have another one of these. Computed in fp32. Source: Peebles and Xie 2023
(adaptive layer norm of diffusion transformers), after Perez et al. 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import (
    number,
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_vectors,
)
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.modulated import MAX_HELD, Modulation, forward
from fusion_backend.kernels.norm.modulated_backward import backward
from fusion_backend.kernels.norm.plain import Kind, normalised, statistics


@Pattern(inductor="reduction")
def modulated_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    norm: Kind,
) -> Tensor:
    is_per_sample(x, scale, shift)
    y = normalised(x, weight, bias, eps, norm) * (1 + scale)
    return (y if shift is None else y + shift).to(x.dtype)


def is_per_sample(x, scale, shift):
    """Raises ValueError for other modulations, which belong to other patterns: a scale for each
    token would need another kernel, and one scale for all samples is the weight of a norm.
    """
    for name, t in dict(scale=scale, shift=shift).items():
        if t is not None and (x.dim() < 3 or t.dim() != x.dim()):
            raise ValueError(f"{name} with shape {tuple(t.shape)} has no row for each sample")
        if t is not None and (any(s != 1 for s in t.shape[1:-1]) or t.shape[-1] != x.shape[-1]):
            raise ValueError(f"{name} with shape {tuple(t.shape)} is not one row for each sample")


@modulated_norm.near_miss
def _(x, weight, bias, scale, shift, eps, norm):
    """scaled by the scale alone"""
    y = normalised(x, weight, bias, eps, norm) * scale
    return y if shift is None else y + shift


@modulated_norm.near_miss
def _(x, weight, bias, scale, shift, eps, norm):
    """a scale for each token"""
    y = normalised(x, weight, bias, eps, norm) * (1 + scale * x[..., :1])
    return y if shift is None else y + shift


@modulated_norm.near_miss
def _(x, weight, bias, scale, shift, eps, norm):
    """the norm of the modulated value"""
    y = x * (1 + scale)
    return normalised(y if shift is None else y + shift, weight, bias, eps, norm)


@modulated_norm.near_miss
def _(x, weight, bias, scale, shift, eps, norm):
    """normalised over the tokens"""
    if weight is not None or bias is not None:
        raise ValueError("a norm over tokens has weights for tokens")
    y = x - x.mean(1, keepdim=True) if norm == "layer" else x
    y = y * torch.rsqrt((y * y).mean(1, keepdim=True) + eps) * (1 + scale)
    return y if shift is None else y + shift


@modulated_norm.near_miss
def _(x, weight, bias, scale, shift, eps, norm):
    """shifted before it is scaled"""
    y = normalised(x, weight, bias, eps, norm)
    return (y + (scale if shift is None else shift)) * (1 + scale)


@modulated_norm.guard
def _(x, weight, bias, scale, shift, eps, norm):
    return (
        reject_rows(x)
        or reject_long(x)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes(x=x, weight=weight, bias=bias)
        or reject_modulation(x, "scale", scale)
        or reject_modulation(x, "shift", shift)
        or reject_dynamic(eps=eps)
    )


def reject_long(x: Tensor) -> Reject | None:
    n = number(x.shape[-1])
    if n > MAX_HELD:
        return Reject(f"a row of {n} is longer than {MAX_HELD}, the most that a program holds")


def reject_modulation(x: Tensor, name: str, t: Tensor | None) -> Reject | None:
    """Refuse a scale or shift that is not known to be one row for each sample, or one for all."""
    if t is None:
        return None
    no = Reject(f"{name} with shape {tuple(t.shape)} may not be one row for each sample of x")
    if x.dim() < 3 or t.dim() != x.dim():
        return no
    samples, *tokens, n = t.shape
    rows = statically_known_true(samples == x.shape[0]) or statically_known_true(samples == 1)
    one = all(statically_known_true(size == 1) for size in tokens)
    if not (rows and one and statically_known_true(n == x.shape[-1])):
        return no
    return reject_dtypes(**{name: t})


@modulated_norm.worthwhile
def _(x, weight, bias, scale, shift, eps, norm, training):
    return UNMEASURED


@modulated_norm.kernel(saves=("mean", "rstd"))
def _(x, weight, bias, scale, shift, eps, norm, save, result_dtype):
    modulation = Modulation(weight, bias, scale, shift, eps, norm == "layer")
    return forward(x, modulation, save, dtype=result_dtype)


@modulated_norm.saved
def _(x, weight, bias, scale, shift, eps, norm):
    return statistics(x, eps, norm)


@modulated_norm.backward
def _(saved, dy):
    shift = saved.shift
    how = saved.weight, saved.bias, saved.scale, shift, saved.eps, saved.norm == "layer"
    return backward(dy, saved.x, saved.mean, saved.rstd, Modulation(*how), saved.needs)


@modulated_norm.inputs(dict(b=2, t=5, n=33), dict(b=4, t=4096, n=3072))
def _(tensor, b, t, n):
    """Scale and shift are slices of the rows of one tensor, as chunk gives them."""
    scale, shift = tensor(b, 2 * n).chunk(2, dim=1)
    return tensor(b, t, n), tensor(n), tensor(n), scale[:, None], shift[:, None], 1e-6, "layer"
