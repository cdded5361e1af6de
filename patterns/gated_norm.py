"""Normalisation of rows with a gate: norm(x) · act(gate), or norm(x · act(gate)), for silu and
sigmoid.

x and gate are `[..., n]` in fp32, bf16 or fp16, their rows up to 8192 long, or 4096 with the gate
in front of a layer norm; norm is that or the RMS norm over the last dimension, weight and bias
`[n]` may be missing, and an RMS norm has no bias. The result has the dtype of x, and so have weight
and bias, unless they are in fp32; the gate may have any of the three.
Computed in fp32, rounded once; the backward keeps x, the gate, and the mean and rstd of each row,
and computes the normalised value again. Source: Dao and Gu 2024 (Mamba-2), which has both orders;
Sun et al. 2023 (RetNet).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import (
    number,
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_vectors,
)
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.inputs import reject_dtypes_of_vectors, same_sizes
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.gated_norm import MAX_HELD, backward, forward
from fusion_backend.kernels.norm.operands import Norm
from fusion_backend.kernels.norm.plain import Kind, normalised, statistics

Gate = Literal["silu", "sigmoid"]
First = Literal["norm", "gate"]


@Pattern(inductor="reduction")
def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: Kind,
    act: Gate,
    first: First,
) -> Tensor:
    is_gated(x, gate, first)
    y = normalised(before_norm(x, gate, act, first), None, None, eps, norm)
    y = affine(y, weight, bias, norm)
    return (y if first == "gate" else y * activate(widened(gate), act)).to(x.dtype)


def before_norm(x, gate, act, first):
    """What is normalised, in fp32 or fp64."""
    return widened(x) * activate(widened(gate), act) if first == "gate" else widened(x)


def widened(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


def affine(y, weight, bias, norm):
    """Raises ValueError for what is no norm with such weights: a second gate is no weight."""
    if bias is not None and norm == "rms":
        raise ValueError("an RMS norm has no bias")
    for name, t in dict(weight=weight, bias=bias).items():
        if t is not None and t.shape != y.shape[-1:]:
            raise ValueError(f"{name} with shape {tuple(t.shape)} is not a vector")
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def is_gated(x, gate, first):
    """Raises ValueError for a gate of another shape, such as one number for each row, and for an
    activation in front of a norm: silu(x) is x · sigmoid(x), but Inductor need not read x twice.
    """
    if x.shape != gate.shape:
        raise ValueError(f"the gate with shape {tuple(gate.shape)} is not that of {tuple(x.shape)}")
    if first == "gate" and x is gate:
        raise ValueError("x times its own gate is an activation")


@gated_norm.near_miss
def _(x, gate, weight, bias, eps, norm, act, first):
    """the norm of the gate"""
    y = affine(normalised(gate, None, None, eps, norm), weight, bias, norm)
    return y * x if first == "norm" else activate(y, act) * x


@gated_norm.near_miss
def _(x, gate, weight, bias, eps, norm, act, first):
    """the gate added, not multiplied"""
    g = activate(gate, act)
    y = normalised(x + g if first == "gate" else x, None, None, eps, norm)
    y = affine(y, weight, bias, norm)
    return y if first == "gate" else y + g


@gated_norm.near_miss
def _(x, gate, weight, bias, eps, norm, act, first):
    """another activation"""
    g = activate(gate, "relu_squared")
    y = normalised(x * g if first == "gate" else x, None, None, eps, norm)
    y = affine(y, weight, bias, norm)
    return y if first == "gate" else y * g


@gated_norm.guard
def _(x, gate, weight, bias, eps, norm, act, first):
    return (
        reject_rows(x)
        or reject_held(x, norm, first)
        or reject_gate(x, gate)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes_of_vectors(x, weight=weight, bias=bias)
        or reject_dtypes(gate=gate)
        or reject_dynamic(eps=eps)
    )


def reject_held(x: Tensor, norm: Kind, first: First) -> Reject | None:
    n, most = number(x.shape[-1]), MAX_HELD // 2 if (norm, first) == ("layer", "gate") else MAX_HELD
    if n > most:
        return Reject(f"a row of {n} is longer than {most}, the most that registers hold")


def reject_gate(x: Tensor, gate: Tensor) -> Reject | None:
    """Refuse a gate that is not known to have a number for each of x."""
    if not same_sizes(x.shape, gate.shape):
        return Reject(f"the gate with shape {tuple(gate.shape)} may not be that of x")
    return reject_rows(gate)


@gated_norm.worthwhile
def _(x, gate, weight, bias, eps, norm, act, first, training):
    return UNMEASURED


@gated_norm.kernel(saves=("mean", "rstd"))
def _(x, gate, weight, bias, eps, norm, act, first, save, result_dtype):
    how = Norm(weight, bias, None, eps, norm == "layer")
    return forward(x, gate, how, act, first == "gate", save, dtype=result_dtype)


@gated_norm.saved
def _(x, gate, weight, bias, eps, norm, act, first):
    return statistics(before_norm(x, gate, act, first), eps, norm)


@gated_norm.backward
def _(saved, dy):
    needs = tuple(saved.needs[name] for name in ("x", "gate", "weight", "bias"))
    norm = Norm(saved.weight, saved.bias, None, saved.eps, saved.norm == "layer")
    how = saved.mean, saved.rstd, norm, saved.act, saved.first == "gate", needs
    return backward(dy, saved.x, saved.gate, *how)


@gated_norm.inputs(dict(rows=9, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n, first=0):
    """The gate behind the norm, and with `first` in front of it."""
    order = "gate" if first else "norm"
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 1e-5, "layer", "silu", order
