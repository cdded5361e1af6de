"""Linear layer, then activation: act(x W + b), for relu, gelu (exact, tanh and quick), silu and
tanh.

x is `[..., k]`, W `[k, n]` with any strides (nn.Linear holds its transpose), b `[n]` may be
missing.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.activations import activate

Act = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"]


@Pattern
def linear_act(x: Tensor, w: Tensor, b: Tensor | None, act: Act) -> Tensor:
    y = x @ w
    return activate(y if b is None else y + b, act)


@linear_act.near_miss
def _(x, w, b, act):
    """the bias added afterwards"""
    y = activate(x, act) @ w
    return y if b is None else y + b


@linear_act.guard
def _(x, w, b, act):
    return reject_dtypes(x=x, w=w, b=b)


@linear_act.inputs(dict(m=5, k=33, n=17), dict(m=16384, k=1024, n=4096))
def _(tensor, m, k, n):
    return tensor(m, k), tensor(k, n), tensor(n), "gelu"
