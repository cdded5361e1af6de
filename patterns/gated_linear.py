"""Gated linear unit: act(x W1 + b1) · (x W2 + b2), both products in one pass over x.

x is `[..., k]`, W1 and W2 `[k, n]` with any strides (nn.Linear holds their transposes), b1 and b2
`[n]` may be missing; the weights may be columns of one packed weight. bf16, fp16 or fp32, sums in
fp32, rounded once. The kernel has act = sigmoid. Source: Dauphin et al. 2017, Shazeer 2020.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, reject_dtypes
from fusion_backend.kernels.common.activations import activate, activation_gradient
from fusion_backend.kernels.common.rows import RESULTS
from fusion_backend.kernels.gemm.gated_linear import forward

Act = Literal["sigmoid", "silu", "gelu", "gelu_tanh", "relu", "identity"]
DECODE = 64  # rows up to which a step only streams the weights


@Pattern
def gated_linear(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Act
) -> Tensor:
    gate, up = x @ w1, x @ w2
    gate = gate if b1 is None else gate + b1
    up = up if b2 is None else up + b2
    return activate(gate, act) * up


@gated_linear.near_miss
def _(x, w1, b1, w2, b2, act):
    """gated by another product than that of x"""
    gate, up = x @ w1, x.flip(0) @ w2
    return activate(gate, act) * up


@gated_linear.near_miss
def _(x, w1, b1, w2, b2, act):
    """the sum of the two"""
    return activate(x @ w1, act) + x @ w2


@gated_linear.guard
def _(x, w1, b1, w2, b2, act):
    if act != "sigmoid":
        return Reject(f"no kernel yet for {act}")
    if x.dim() < 2 or w1.dim() != 2 or w2.dim() != 2:
        return Reject(
            f"x has {x.dim()} dimensions, w1 {w1.dim()} and w2 {w2.dim()}; at least 2, 2 and 2 "
            "are needed"
        )
    sizes = (*w1.shape, *w2.shape, *w1.stride(), *w2.stride())
    if any(dynamic(size) for size in sizes):
        return Reject("a weight has a dynamic shape")
    if tuple(w1.shape) != tuple(w2.shape):
        return Reject(f"w1 has shape {tuple(w1.shape)} and w2 {tuple(w2.shape)}")
    if (
        max(
            size * stride
            for w in (w1, w2)
            for size, stride in zip(w.shape, w.stride(), strict=True)
        )
        >= 2**31
    ):
        return Reject(f"weights of {tuple(w1.shape)} exceed offsets of 32 bits")
    for name, bias in dict(b1=b1, b2=b2).items():
        if bias is not None and not (tuple(bias.shape) == (w1.shape[1],) and bias.stride(0) == 1):
            return Reject(
                f"{name} with shape {tuple(bias.shape)} and strides {bias.stride()} is not a "
                "plain vector"
            )
    return reject_dtypes(x=x, w1=w1, b1=b1, w2=w2, b2=b2)


@gated_linear.worthwhile
def _(x, w1, b1, w2, b2, act, training):
    k, n = w1.shape
    rows = math.prod(x.shape[:-1])
    if statically_known_true(rows <= DECODE):
        return Reject(f"{rows} rows fill too few tiles; such a step waits for the weights")
    if training:
        return Reject(f"Inductor's training step is as fast ({RESULTS})")
    if k > 1024:
        return Reject(f"with {k} columns of x the library's product wins ({RESULTS})")
    if k % 8 or n % 8:
        return Reject(f"weights of {k} x {n} are not aligned to 16 bytes")
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return Reject(
            "fp32 without TF32 has no tensor cores: set torch.set_float32_matmul_precision('high')"
        )


@gated_linear.kernel(saves=("gate",))
def _(x, w1, b1, w2, b2, act, save):
    return forward(x, w1, b1, w2, b2, save)


@gated_linear.saved
def _(x, w1, b1, w2, b2, act):
    gate = x @ w1
    return gate if b1 is None else gate + b1


@gated_linear.backward(plain=True, result=True)
def _(saved, dy):
    x, w1, w2 = saved.x, saved.w1, saved.w2
    dy, gate = dy.float(), saved.gate.float()
    d_up = dy * activate(gate, saved.act)
    # sigmoid' = sigmoid · (1 - sigmoid): the result has the first factor, and 1 - sigmoid(gate) is
    # sigmoid(-gate), without cancellation
    if saved.act == "sigmoid":
        d_gate = dy * saved.result.float() * torch.sigmoid(-gate)
    else:  # x W2 + b2, computed again
        up = (x @ w2).float() if saved.b2 is None else (x @ w2 + saved.b2).float()
        d_gate = activation_gradient(dy * up, gate, saved.act)
    # The gradients of the biases are sums in fp32, the operands of the products rounded.
    grads = dict.fromkeys(("x", "w1", "b1", "w2", "b2"))
    for b, d in dict(b1=d_gate, b2=d_up).items():
        if getattr(saved, b) is not None and saved.needs[b]:
            grads[b] = d.sum_to_size(getattr(saved, b).shape).to(getattr(saved, b).dtype)
    rows = [d.to(x.dtype) for d in (d_gate, d_up)]
    if w1.dim() == w2.dim() == 2:  # one product of all rows
        x, *rows = (t.reshape(-1, t.shape[-1]) for t in (x, *rows))
    elif x.dim() == 1:
        x, *rows = (t.unsqueeze(-2) for t in (x, *rows))
    if saved.needs["x"]:
        grads["x"] = gradient_of_x(*rows, w1, w2).sum_to_size(x.shape).reshape(saved.x.shape)
    for w, d in zip(("w1", "w2"), rows, strict=True):
        if saved.needs[w]:
            grads[w] = weight_gradient(x, d, getattr(saved, w))
    return tuple(grads.values())


def gradient_of_x(d_gate, d_up, w1, w2):
    if d_gate.dim() == w1.dim() == w2.dim() == 2:
        return torch.addmm(d_gate @ w1.t(), d_up, w2.t())
    return d_gate @ w1.mT + d_up @ w2.mT


def weight_gradient(x, d, weight):
    """xᵀ d, laid out in memory as the weight is: the view of a linear layer's weight gets a
    gradient it can keep.
    """
    found = (d.mT @ x).mT if weight.stride(-2) == 1 else x.mT @ d
    return found.sum_to_size(weight.shape)


@gated_linear.inputs(dict(m=5, k=33, n=17), dict(m=16384, k=1024, n=4096))
def _(tensor, m, k, n):
    return tensor(m, k), tensor(k, n), tensor(n), tensor(k, n), tensor(n), "sigmoid"
