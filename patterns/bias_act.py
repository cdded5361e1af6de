"""Bias, then activation: act(x + b), elementwise, for relu, gelu (exact and tanh), silu, tanh and exp(relu).

x is `[..., n]`; b broadcasts to it, as a rule `[n]`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.activations import activate
from fusion_backend.kernels.inputs import reject_dtypes

Act = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "exp_relu"]


@Pattern
def bias_act(x: Tensor, b: Tensor, act: Act) -> Tensor:
    return activate(x + b, act)


@bias_act.near_miss
def _(x, b, act):
    """the bias added afterwards"""
    return activate(x, act) + b


@bias_act.near_miss
def _(x, b, act):
    """the bias subtracted twice"""
    return activate(x - 2 * b, act).neg()


@bias_act.guard
def _(x, b, act):
    return reject_dtypes(x=x, b=b)


@bias_act.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), "gelu"
