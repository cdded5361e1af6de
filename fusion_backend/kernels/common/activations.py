"""The activations that patterns name with a word, as plain torch code and for kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.gelu import branchless_slope


def activate(x: Tensor, act: str) -> Tensor:
    """act(x) for the words that patterns take; quick_gelu is x · sigmoid(1.702 x)."""
    match act:
        case "identity":
            return x
        case "relu":
            return F.relu(x)
        case "relu6":
            return F.relu6(x)
        case "hardswish":
            return F.hardswish(x)
        case "exp_relu":
            return torch.exp(F.relu(x))
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return torch.tanh(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "relu_squared":
            return F.relu(x).square()
    raise ValueError(f"no activation is called {act!r}")


def activation_gradient(dy: Tensor, x: Tensor, act: str, rounded: bool = False) -> Tensor:
    """dy · act'(x) of fp32, in plain torch code that Inductor fuses and that may be differentiated
    again. rounded: to 16 bits, afterwards; then GELU's is computed without branches, to 1e-6.
    """
    match act:
        case "identity":
            return dy
        case "relu":
            return torch.where(x <= 0, 0.0, dy)  # NaN passes it on, as in eager
        case "relu_squared":
            return dy * 2 * F.relu(x)
        case "gelu" | "gelu_tanh":
            approximate = "tanh" if act == "gelu_tanh" else "none"
            if rounded:
                return dy * branchless_slope(x, approximate)
            return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
        case "quick_gelu":
            s = torch.sigmoid(1.702 * x)
            return dy * (s + 1.702 * x * s * (1 - s))
        case "silu":
            return torch.ops.aten.silu_backward(dy, x)
        case "sigmoid":
            return dy * torch.sigmoid(x) * (1 - torch.sigmoid(x))
        case "tanh":
            return dy * (1 - torch.tanh(x) ** 2)
    raise ValueError(f"no gradient of {act!r}")


@triton.jit
def activated(x, ACT: tl.constexpr):
    """act(x) in a kernel, x in fp32, for identity, relu, relu6, hardswish, exp_relu, relu_squared,
    gelu, gelu_tanh, quick_gelu, silu, tanh and sigmoid.
    """
    tl.static_assert(x.dtype == tl.float32)
    if ACT == "identity":
        y = x
    elif ACT == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    elif ACT == "relu6":
        y = within_six(x)
    elif ACT == "hardswish":
        y = x * within_six(x + 3.0) * 0.16666667
    elif ACT == "exp_relu":
        y = exp(tl.where(x < 0.0, 0.0, x))
    elif ACT == "relu_squared":
        y = tl.where(x < 0.0, 0.0, x)
        y = y * y
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "tanh":
        y = tanh(x)
    else:
        tl.static_assert(ACT == "sigmoid")
        y = tl.sigmoid(x)
    return y


@triton.jit
def within_six(x):
    """relu6(x); NaN stays NaN."""
    return tl.where(x < 0.0, 0.0, tl.where(x > 6.0, 6.0, x))


@triton.jit
def exp(x):
    """e^x within 3 ulp. The hardware computes 2^t: a t of 100, rounded to fp32, alone costs 45 ulp,
    so its rounding error is put back.
    """
    t = x * 1.4426950216293335
    rest = tl.fma(x, 1.4426950216293335, -t) + x * 1.9259629911266175e-8
    y = tl.exp2(t)
    return tl.where((y > 0) & (y < float("inf")), y + y * (rest * 0.6931471805599453), y)


@triton.jit
def tanh(x):
    """Hyperbolic tangent within 4 ulp: a polynomial near zero, where 1 - 2 / (e^2x + 1) would
    cancel.
    """
    z = x * x
    p = ((-0.0066157466 * z + 0.021312739) * z - 0.053910065) * z + 0.13333118
    near = x + x * z * (p * z - 0.33333332)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(z < 0.3025, near, tl.where(x < 0.0, -far, far))
