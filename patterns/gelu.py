"""GELU, x · Φ(x), in bf16 and fp16: exact, and with approximate="tanh", x · σ(2 √(2/π) (x +
0.044715 x³)).

x of any shape and strides. Inductor's gelu is limited by the instructions of erf and tanh, not by
memory. Here the same functions are plain torch code without a branch (kernels/common/gelu.py),
which Inductor fuses with its neighbours as before. The error, 1e-6, is far below the rounding of
the result. In fp32 such an error would be seen, and Inductor is closer to the memory limit.
Source: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels.common.gelu import branchless, branchless_slope

LOST = "timed at 0.82 to 0.93 of Inductor on an H200"


@Pattern
def gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    return F.gelu(x, approximate=approximate)


@gelu.near_miss
def _(x, approximate):
    """another sigmoid"""
    return x * torch.sigmoid(1.702 * x)


@gelu.near_miss
def _(x, approximate):
    """erf of x itself"""
    return 0.5 * x * (1 + torch.erf(x))


@gelu.near_miss
def _(x, approximate):
    """another cubic"""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.05 * x * x * x)))


@gelu.neighbours
def _(around, training):
    if transposed := [name for name in around.convolutions if "transpose" in name]:
        return Reject(f"around {transposed[0]} the formula is written to memory: {LOST}")
    if around.reductions:
        return Reject(f"before {around.reductions[0]} the formula is written to memory: {LOST}")


@gelu.replacement
def _(x, approximate):
    why = "computed without the branches of " + ("erf" if approximate == "none" else "tanh")
    return Replacement(branchless_gelu, (x, approximate), {}, why, otherwise="gelu stays")


@Op
def branchless_gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """x · Φ(x), where Φ is computed in fp32 by one formula for all x."""
    return branchless(x.float(), approximate).to(x.dtype)


@branchless_gelu.guard
def _(x, approximate):
    if x.dtype not in (torch.bfloat16, torch.float16):
        return Reject(
            f"x is {str(x.dtype).removeprefix('torch.')}: the error of the formula, 1e-6, would "
            "be seen"
        )


@branchless_gelu.backward(plain=True)
def _(saved, dy):
    slope = branchless_slope(saved.x.float(), saved.approximate)
    return (dy.float() * slope).to(saved.x.dtype)


@gelu.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n, tanh=0):
    return tensor(rows, n), "tanh" if tanh else "none"
