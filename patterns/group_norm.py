"""Group normalisation: act(group_norm(x, groups) · weight + bias) over groups of channels in dimension 1.

x is `[b, c, ...]`, weight and bias `[c]` may be missing. act is silu or nothing. Source: Wu and He 2018.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.activations import activate
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: Literal["identity", "silu"]
) -> Tensor:
    return activate(F.group_norm(x, groups, weight, bias, eps), act)


@group_norm.near_miss
def _(x, groups, weight, bias, eps, act):
    """of every instance and channel"""
    return activate(F.instance_norm(x, weight=weight, bias=bias, eps=eps), act)


@group_norm.guard
def _(x, groups, weight, bias, eps, act):
    return reject_dtypes(x=x, weight=weight, bias=bias) or reject_dynamic(groups=groups, eps=eps)


@group_norm.inputs(dict(b=2, c=60, n=4, groups=2), dict(b=16, c=480, n=64, groups=32))
def _(tensor, b, c, n, groups):
    return tensor(b, c, n, n), groups, tensor(c), tensor(c), 1e-5, "identity"
