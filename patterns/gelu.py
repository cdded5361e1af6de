"""GELU, x · Φ(x), in bf16 and fp16: exact, and with approximate="tanh", x · σ(2 √(2/π) (x +
0.044715 x³)).

x of any shape and strides. erf and tanh of fp32 have two branches each, of which 32 lanes mostly
take both, one element after another: Inductor's gelu is bound by instructions, not by memory. Here
the same functions are plain torch code without a branch, which Inductor fuses with its neighbours
as before. With h = Φ(-|x|) the exact one is exp(-x²/2) · t · P(t), t = 1 / (1 + 0.295 |x|), P of
degree 5: to |x| = 6.5 within 1e-6, far below the rounding of the result (after Abramowitz and
Stegun 1964, 7.1.26; coefficients fitted for this range); the derivative has the same exponential. 1
/ y is computed as rsqrt(y²): an instruction where a division is five. In fp32 such an error would
be seen, and Inductor is closer to the memory limit. Source: Hendrycks and Gimpel 2016.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Op, Pattern, Reject, Replacement

LOG2E = 1.4426950408889634
NEAR = 0.295
# of t⁶, ..., t
COEFFICIENTS = -0.0874210231, 0.26418225, -0.0721303569, 0.172581036, 0.103912945, 0.118875099
LOST = "timed at 0.82 to 0.93 of Inductor on an H200"
SLOPE, CUBIC = 1.5957691216057308, 0.07135481282553557  # 2 √(2/π), and that times 0.044715


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


def normal_distribution(x: Tensor, bell: Tensor, sign: int) -> Tensor:
    """Φ(x) of an x in fp32, given exp(-x²/2). sign: of the number that is squared."""
    y = sign * NEAR * x.abs() + sign
    t = torch.rsqrt(y * y)
    p = torch.full_like(x, COEFFICIENTS[0])
    for c in COEFFICIENTS[1:]:
        p = p * t + c
    tail = p * t * bell
    return torch.where(x < 0, tail, 1 - tail)


def sigmoid(exponential: Tensor, sign: int) -> Tensor:
    """1 / (1 + exponential)"""
    y = sign * exponential + sign
    return torch.rsqrt(y * y)


@Op
def branchless_gelu(x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """x · Φ(x), where Φ is computed in fp32 by one formula for all x."""
    wide = x.float()
    if approximate == "tanh":
        cubic = wide * (-LOG2E * SLOPE - LOG2E * CUBIC * wide * wide)
        return (wide * sigmoid(torch.exp2(cubic), 1)).to(x.dtype)
    bell = torch.exp2(wide * (-0.5 * LOG2E) * wide)
    return (wide * normal_distribution(wide, bell, 1)).to(x.dtype)


@branchless_gelu.guard
def _(x, approximate):
    if x.dtype not in (torch.bfloat16, torch.float16):
        return Reject(
            f"x is {str(x.dtype).removeprefix('torch.')}: the error of the formula, 1e-6, would "
            "be seen"
        )


# Not written as the forward is: of what is, AOTAutograd makes one node, and may keep it for
# backward, in fp32.
@branchless_gelu.backward(plain=True)
def _(saved, dy):
    x = saved.x.float()
    square = x * x
    if saved.approximate == "tanh":
        s = sigmoid(torch.exp2(x * (square * (-LOG2E * CUBIC) - LOG2E * SLOPE)), -1)
        slope = s + x * s * (1 - s) * (3 * CUBIC * square + SLOPE)
    else:
        bell = torch.exp2(square * (-0.5 * LOG2E))
        slope = normal_distribution(x, bell, -1) + 0.3989422804014327 * x * bell
    return (dy.float() * slope).to(saved.x.dtype)


@gelu.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n, tanh=0):
    return tensor(rows, n), "tanh" if tanh else "none"
