"""Softmax over the last dimension: softmax(x · scale + mask), or with `fill` where `drop` is set.

x is `[..., n]`; scale, the additive mask, and the boolean `drop` with its number `fill` may be missing. Masks
broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern(reciprocal=True)
def softmax(x: Tensor, scale: float | None, mask: Tensor | None, drop: Tensor | None, fill: float | None) -> Tensor:
    if (drop is None) != (fill is None) or (mask is not None and drop is not None):
        raise ValueError("one mask at most; drop and fill belong together")
    x = x if scale is None else x * scale
    x = x if mask is None else x + mask
    x = x if drop is None else x.masked_fill(drop, fill)
    return torch.softmax(x, -1)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """another dimension"""
    return torch.softmax(x, 0)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """the logarithm of it"""
    return torch.log_softmax(x, -1)


@softmax.guard
def _(x, scale, mask, drop, fill):
    return reject_dtypes(x=x, mask=mask) or reject_dynamic(scale=scale, fill=fill)


@softmax.inputs(dict(rows=7, n=100), dict(rows=65536, n=2048))
def _(tensor, rows, n):
    return tensor(rows, n), 0.125, tensor(rows, n), tensor(rows, n) > 1, -1e9
