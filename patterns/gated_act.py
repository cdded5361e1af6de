"""Gated activation of a packed tensor: act(one half of its last dimension) times the other half
(SwiGLU, GLU, ...).

x is `[..., 2n]`, the result `[..., n]`; `gate` says which half goes through the activation. This
pattern remains of a gated linear layer if the projection in front is not a linear layer: experts in
groups, a convolution, a quantised product. Source: Dauphin et al. 2017, Shazeer 2020,
torch.nn.functional.glu.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.activations import activate


@Pattern(inductor="pointwise")
def gated_act(
    x: Tensor,
    act: Literal["sigmoid", "silu", "gelu", "gelu_tanh", "relu"],
    gate: Literal["first", "second"],
) -> Tensor:
    first, second = x.chunk(2, -1)
    return activate(first, act) * second if gate == "first" else first * activate(second, act)


@gated_act.near_miss
def _(x, act, gate):
    """one half for both"""
    first, second = x.chunk(2, -1)
    return activate(first, act) * first if gate == "first" else second * activate(second, act)


@gated_act.near_miss
def _(x, act, gate):
    """halves of another dimension"""
    first, second = x.chunk(2, 0)
    return activate(first, act) * second if gate == "first" else first * activate(second, act)


@gated_act.guard
def _(x, act, gate):
    return reject_dtypes(x=x)


@gated_act.inputs(dict(rows=8, n=50), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, 2 * n), "silu", "first"
