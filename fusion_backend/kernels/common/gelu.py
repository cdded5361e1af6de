"""GELU and its slope in plain torch code without a branch, for results that are rounded to 16 bits.

erf and tanh of fp32 have two branches each, of which 32 lanes mostly take both, one element after
another. With h = Φ(-|x|) the exact GELU is exp(-x²/2) · t · P(t), t = 1 / (1 + 0.295 |x|), P of
degree 5: to |x| = 6.5 within 1e-6 (after Abramowitz and Stegun 1964, 7.1.26; coefficients fitted
for this range); the derivative has the same exponential. 1 / y is computed as rsqrt(y²): an
instruction where a division is five.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2E = 1.4426950408889634
NEAR = 0.295
# of t⁶, ..., t
COEFFICIENTS = -0.0874210231, 0.26418225, -0.0721303569, 0.172581036, 0.103912945, 0.118875099
SLOPE, CUBIC = 1.5957691216057308, 0.07135481282553557  # 2 √(2/π), and that times 0.044715


def branchless(x: Tensor, approximate: str) -> Tensor:
    """x · Φ(x) of an x in fp32, or with approximate="tanh" x · σ(2 √(2/π) (x + 0.044715 x³))."""
    if approximate == "tanh":
        cubic = x * (-LOG2E * SLOPE - LOG2E * CUBIC * x * x)
        return x * sigmoid(torch.exp2(cubic), 1)
    bell = torch.exp2(x * (-0.5 * LOG2E) * x)
    return x * normal_distribution(x, bell, 1)


def branchless_slope(x: Tensor, approximate: str) -> Tensor:
    """The derivative of `branchless`.

    It is not written as that is: of what is, AOTAutograd makes one node, and may keep it for
    backward, in fp32.
    """
    square = x * x
    if approximate == "tanh":
        s = sigmoid(torch.exp2(x * (square * (-LOG2E * CUBIC) - LOG2E * SLOPE)), -1)
        return s + x * s * (1 - s) * (3 * CUBIC * square + SLOPE)
    bell = torch.exp2(square * (-0.5 * LOG2E))
    return normal_distribution(x, bell, -1) + 0.3989422804014327 * x * bell


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
