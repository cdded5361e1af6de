"""What a program does with its tile of a product before it stores it: activations and their slopes.

Where the result is rounded to 16 bits, they are computed without branches, and without a division:
1 / y is rsqrt(y²), one instruction where a division is five, so that the epilogue of one program
takes no longer than the products of the other. Φ, the normal distribution, is that of
kernels/common/gelu.py, to 1e-6; the others have the precision of the hardware's 2^x and rsqrt,
about 1e-7. GELU that is rounded to bf16 is x (1 + tanh u) / 2 with the hardware's tanh, one
instruction, 2^-11 of its result off: 2.5e-4 |x| at most, where rounding costs up to 2e-3 |x| for
positive x. In fp32 they are those of kernels/common/activations.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.activations import activated, tanh

# What stands for a dropped product: the least number that both bf16 and fp16 can hold. relu,
# relu_squared, the forms of gelu and silu are 0 there, and so are their slopes.
LOWEST = tl.constexpr(-65280.0)


@triton.jit
def logistic(exponent):
    """1 / (1 + 2^exponent)"""
    y = 1.0 + tl.exp2(exponent)
    return tl.rsqrt(y * y)


@triton.jit
def bell_of(x):
    """exp(-x² / 2)"""
    return tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def normal_distribution(x, bell):
    """Φ(x), given exp(-x² / 2)."""
    y = 1.0 + 0.295 * tl.abs(x)
    t = tl.rsqrt(y * y)
    p = (-0.0874210231 * t + 0.26418225) * t - 0.0721303569
    p = ((p * t + 0.172581036) * t + 0.103912945) * t + 0.118875099
    tail = p * t * bell
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def gelu_tanh_logistic(x):
    """The factor of x in the tanh form of GELU."""
    return logistic(x * (-2.302208198 - 0.1029432397 * x * x))


@triton.jit
def hardware_tanh(x, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # it has no instructions
        y = tanh(x)
    else:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def tanh_of_normal(x, INTERPRETED: tl.constexpr):
    """2 Φ(x) - 1 = erf(x / √2) as a tanh. Its argument is atanh(erf(x / √2)), as a polynomial that
    was fitted so that GELU is 2.6e-5 off at most; from |x| = 4 on, tanh is 1.
    """
    square = tl.minimum(x * x, 16.0)
    slope = (-0.000351523708 * square + 0.0370056851) * square + 0.797507845
    return hardware_tanh(x * slope, INTERPRETED)


@triton.jit
def gelu_by_tanh(x, ACT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Both forms of GELU."""
    if ACT == "gelu":
        y = tanh_of_normal(x, INTERPRETED)
    else:
        y = hardware_tanh(x * (0.0356774081 * x * x + 0.7978845608), INTERPRETED)
    half = 0.5 * x
    return tl.fma(half, y, half)


@triton.jit
def rounded(x, ACT: tl.constexpr):
    """act(x), x in fp32, for a result that is rounded to 16 bits."""
    if ACT == "gelu":
        y = x * normal_distribution(x, bell_of(x))
    elif ACT == "gelu_tanh":
        y = x * gelu_tanh_logistic(x)
    elif ACT == "quick_gelu":
        y = x * logistic(x * -2.455466829)  # 1.702 log2(e)
    elif ACT == "silu":
        y = x * logistic(x * -1.4426950408889634)
    elif ACT == "sigmoid":
        y = logistic(x * -1.4426950408889634)
    else:
        y = activated(x, ACT)
    return y


@triton.jit
def mark(y, survive):
    """y, or `LOWEST` where it is dropped. What is dropped becomes NaN if it is infinite or NaN, as
    it does when dropout multiplies it by 0.
    """
    return tl.where(survive, y, y * 0.0 + LOWEST)


@triton.jit
def epilogue(x, ACT: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """act(x), x in fp32. KIND: the dtype that it is rounded to."""
    if KIND == tl.bfloat16 and (ACT == "gelu" or ACT == "gelu_tanh"):
        y = gelu_by_tanh(x, ACT, INTERPRETED)
    elif KIND == tl.float32:
        y = activated(x, ACT)
    else:
        y = rounded(x, ACT)
    return y


@triton.jit
def slope(x, ACT: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """act'(x), x in fp32, for a gradient that is rounded to 16 bits, KIND; act is relu,
    relu_squared, gelu, gelu_tanh, quick_gelu or silu.
    """
    if ACT == "relu":
        y = tl.where(x <= 0.0, 0.0, 1.0)  # NaN passes a gradient on, as in eager
    elif ACT == "relu_squared":
        y = tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACT == "gelu":
        bell = bell_of(x)
        if KIND == tl.bfloat16:
            y = 0.5 + 0.5 * tanh_of_normal(x, INTERPRETED)
        else:
            y = normal_distribution(x, bell)
        y += 0.3989422804014327 * x * bell
    elif ACT == "gelu_tanh":
        s = gelu_tanh_logistic(x)
        y = s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406443837 * x * x)
    elif ACT == "quick_gelu":
        s = logistic(x * -2.455466829)
        y = s + 1.702 * x * s * (1.0 - s)
    else:
        tl.static_assert(ACT == "silu")
        s = logistic(x * -1.4426950408889634)
        y = s + x * s * (1.0 - s)
    return y
