"""Rotary position embedding: x · cos + rotate(x) · sin.

x is `[..., d]`, cos and sin broadcast to it. style says what rotate does with the halves (x1, x2)
of the last dimension: half gives (-x2, x1); interleaved takes pairs of neighbours instead; split is
half with cos and sin of d/2, and pairs is interleaved with these, which is also the product of
complex numbers (x1 + i x2) · (cos + i sin). Source: Su et al. 2021.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes


@Pattern
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, style: Literal["half", "interleaved", "split", "pairs"]
) -> Tensor:
    if style == "pairs":
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    if style == "interleaved":
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
    x1, x2 = x.chunk(2, -1)
    if style == "half":
        return x * cos + torch.cat((-x2, x1), -1) * sin
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


@rotary.near_miss
def _(x, cos, sin, style):
    """rotated the other way"""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((x2, -x1), -1) * sin


@rotary.near_miss
def _(x, cos, sin, style):
    """pairs turned the other way, by the conjugate"""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos + x2 * sin, x2 * cos - x1 * sin), -1).flatten(-2)


@rotary.near_miss
def _(x, cos, sin, style):
    """halves of another dimension"""
    x1, x2 = x.chunk(2, -2)
    return x * cos + torch.cat((-x2, x1), -2) * sin


@rotary.guard
def _(x, cos, sin, style):
    return reject_dtypes(x=x, cos=cos, sin=sin)


@rotary.inputs(dict(b=2, h=4, n=6, d=8), dict(b=8, h=16, n=2048, d=128))
def _(tensor, b, h, n, d):
    return tensor(b, h, n, d), tensor(n, 1), tensor(n, 1), "half"
