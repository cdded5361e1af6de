"""Normalisation of rows, then an activation: act(norm(x)), for relu, gelu (exact, tanh and quick)
and silu.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 8192 long; norm is the layer norm or the RMS
norm over the last dimension, weight and bias `[n]` may be missing, and an RMS norm has no bias.
Computed in fp32, rounded once; the backward keeps x and the mean and rstd of each row, and computes
the normalised value again. Projection heads have this pattern behind a linear layer. If the columns
are not adjacent in memory, as behind the convolutions of wav2vec 2.0, the site is left to Inductor.
"""

from __future__ import annotations

from typing import Literal

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
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.norm_act import MAX_HELD, backward, forward
from fusion_backend.kernels.norm.operands import Norm
from fusion_backend.kernels.norm.plain import Kind, normalised, statistics

Act = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]


@Pattern(inductor="reduction")
def norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: Kind,
    act: Act,
) -> Tensor:
    return activate(normalised(x, weight, bias, eps, norm), act)


@norm_act.near_miss
def _(x, weight, bias, eps, norm, act):
    """the norm of the activation"""
    return normalised(activate(x, act), weight, bias, eps, norm)


@norm_act.near_miss
def _(x, weight, bias, eps, norm, act):
    """a sum between them"""
    return activate(normalised(x, weight, bias, eps, norm) + x, act)


@norm_act.guard
def _(x, weight, bias, eps, norm, act):
    return (
        reject_rows(x)
        or reject_held(x)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes(x=x, weight=weight, bias=bias)
        or reject_dynamic(eps=eps)
    )


def reject_held(x: Tensor) -> Reject | None:
    n = number(x.shape[-1])
    if n > MAX_HELD:
        return Reject(f"a row of {n} is longer than {MAX_HELD}, the most that a program holds")


@norm_act.worthwhile
def _(x, weight, bias, eps, norm, act, training):
    return UNMEASURED


@norm_act.kernel(saves=("mean", "rstd"))
def _(x, weight, bias, eps, norm, act, save):
    return forward(x, Norm(weight, bias, None, eps, norm == "layer"), act, save)


@norm_act.saved
def _(x, weight, bias, eps, norm, act):
    return statistics(x, eps, norm)


@norm_act.backward
def _(saved, dy):
    needs = tuple(saved.needs[name] for name in ("x", "weight", "bias"))
    norm = Norm(saved.weight, saved.bias, None, saved.eps, saved.norm == "layer")
    return backward(dy, saved.x, saved.mean, saved.rstd, norm, saved.act, needs)


@norm_act.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n, silu=0):
    return tensor(rows, n), tensor(n), tensor(n), 1e-5, "layer", "silu" if silu else "gelu"
