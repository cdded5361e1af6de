"""int8 linear layer, its result scaled back: (q W) · scale · w_scale + b, the products summed in
int32.

q is `[m, k]` and W `[k, n]` in int8 (a linear layer holds its transpose), scale `[m, 1]` or a
number, w_scale `[n]` or `[1]`, b `[n]` may be missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend import Pattern


@Pattern
def dequantize_linear(
    q: Tensor, w: Tensor, scale: Tensor | float, w_scale: Tensor, b: Tensor | None
) -> Tensor:
    # exact, as int32 is, on every device
    y = (q.double() @ w.double()).to(w_scale.dtype) * scale * w_scale
    return y if b is None else y + b


@dequantize_linear.spelling
def _(q, w, scale, w_scale, b):
    y = (q.int() @ w.int()).to(w_scale.dtype) * scale * w_scale
    return y if b is None else y + b


@dequantize_linear.near_miss
def _(q, w, scale, w_scale, b):
    """scaled once only, by the sum of the scales"""
    return (q.int() @ w.int()).to(w_scale.dtype) * (scale + w_scale)


@dequantize_linear.guard
def _(q, w, scale, w_scale, b):
    return None


@dequantize_linear.inputs(dict(m=32, k=32, n=16), dict(m=4096, k=4096, n=4096))
def _(tensor, m, k, n):
    q, w = ((tensor(*shape) * 50).to(torch.int8) for shape in ((m, k), (k, n)))
    return q, w, tensor(m, 1), tensor(n), tensor(n)
