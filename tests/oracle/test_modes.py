"""Autocast, grad and inference modes and backend-choosing contexts, inside and around a compiled
model.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .harness import TORCH, Case, compare
from .models import NO_GATE, ONE_GATE, Gate, X, gate, gate_inputs


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def no_cast():
    return torch.autocast("cpu", enabled=False)


def autocast_inside(x, w1, b1, w2, b2):
    with bf16():
        y = gate(x, w1, b1, w2, b2)
        z = F.softmax(y, -1)
    return y, z, x.sin()


def autocast_and_back(x, w1, b1, w2, b2):
    with bf16():
        y = gate(x, w1, b1, w2, b2)
        with no_cast():
            z = gate(y.to(x.dtype), w1, b1, w2, b2)
        return y, F.layer_norm(z + y, (16,))


def half_in_autocast(x, w1, b1, w2, b2):
    with bf16():
        g = torch.sigmoid(x @ w1 + b1)
    return g * (x @ w2 + b2)


def residual_and_norm(x, w1, b1, w2, b2):
    h = F.linear(x, w1, b1)
    h = F.layer_norm(h + h.to(x.dtype), (16,), b1, b2)
    return torch.cat([F.softmax(h, -1), F.linear(x, w2)], -1)


def add_mul_promoted(x, w1, b1, w2, b2):
    return (F.linear(x, w1) + x) * b1


def autocast_bf16_input(x, w1, b1, w2, b2):
    with bf16():
        return gate(x.bfloat16(), w1, b1, w2.bfloat16(), b2)


def no_grad_inside(x, w1, b1, w2, b2):
    with torch.no_grad():
        s = gate(x, w1, b1, w2, b2)
    return F.linear(x, w1) * s


def no_grad_half(x, w1, b1, w2, b2):
    with torch.no_grad():
        s = torch.sigmoid(x @ w1 + b1)
    return s * (x @ w2 + b2)


def no_grad_function(x, w1, b1, w2, b2):
    return torch.no_grad()(gate)(x, w1, b1, w2, b2) * x


def grad_inside_no_grad(x, w1, b1, w2, b2):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            y = gate(y, w1, b1, w2, b2)
    return y


def inference_inside(x, w1, b1, w2, b2):
    with torch.inference_mode():
        return gate(x, w1, b1, w2, b2) + 0


def inference_and_gate(x, w1, b1, w2, b2):
    with torch.inference_mode():
        s = F.linear(x, w1).sum()
    return gate(x, w1, b1, w2, b2), s


def sdpa_math(x, w1, b1, w2, b2):
    h = gate(x, w1, b1, w2, b2).view(1, 2, 8, 8)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(h, h, h).sin()


def detach_inside(x, w1, b1, w2, b2):
    return gate(x.detach(), w1, b1.detach(), w2, b2)


def detached_half(x, w1, b1, w2, b2):
    return torch.sigmoid(x @ w1 + b1).detach() * (x @ w2 + b2)


def case(fn, inputs=gate_inputs, **kw):
    return Case(kw.pop("name", fn.__name__), lambda: fn, inputs, **kw)


def around(name, fn, context, **kw):
    return case(fn, name=f"{name}_around_{fn.__name__}", around=lambda k: context(), **kw)


NO_INFERENCE = "AOTAutograd refuses it before torch 2.13" if TORCH < (2, 13) else ""

CASES = [
    case(autocast_inside, fused=ONE_GATE),
    case(autocast_and_back, fused={"gated_linear": 2, "layer_norm": 2}),
    case(half_in_autocast),
    # bf16 operator by operator is what eager computes: it has no error to compare ours with
    case(autocast_bf16_input, exact="eager", generated=True),
    around("autocast", gate, bf16, fused=ONE_GATE),
    around("autocast", residual_and_norm, bf16, fused={"layer_norm": 2}),
    around("autocast", add_mul_promoted, bf16),
    around("autocast", autocast_and_back, bf16, fused={"gated_linear": 2, "layer_norm": 2}),
    around("autocast_off", autocast_inside, no_cast, fused=ONE_GATE),
    case(no_grad_inside, fused=ONE_GATE),
    case(no_grad_half, fused=NO_GATE, same_saved=False),
    case(no_grad_function, fused=ONE_GATE),
    case(grad_inside_no_grad, fused=ONE_GATE),
    case(inference_inside, exact="eager", generated=True),
    case(inference_and_gate, exact="eager", fused=ONE_GATE, skip=NO_INFERENCE),
    case(sdpa_math, fused=ONE_GATE),
    case(detach_inside, fused=ONE_GATE),
    case(detached_half, fused=NO_GATE),
    around("no_grad", gate, torch.no_grad, train=False, fused=ONE_GATE),
    around("inference", gate, torch.inference_mode, train=False, fused=ONE_GATE),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_modes(case):
    compare(case)


def test_modes_in_turn():
    """One compiled module under one mode after another: as many recompiles as plain Inductor."""
    contexts = [
        contextlib.nullcontext,
        torch.no_grad,
        bf16,
        contextlib.nullcontext,
        torch.inference_mode,
    ]
    turn = Case(
        "turn",
        Gate,
        lambda k: (X(8, 16),),
        {"gated_linear": 4},
        calls=5,
        around=lambda k: contexts[k](),
    )
    assert compare(turn).graphs == [1, 2, 3, 3, 4]
