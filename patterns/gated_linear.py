"""Gated linear unit: act(x W1 + b1) · (x W2 + b2), both products in one pass over x.

x is `[..., k]`, W1 and W2 `[k, n]` with dense rows or columns (nn.Linear holds their transposes),
b1 and b2 `[n]` may be missing; the weights may be columns of one packed weight. bf16, fp16, or fp32
with TF32; sums in fp32, rounded once. Where tiles have finishers (kernels/gemm/tiles.py), which is
on Hopper, the products are rounded as well, before their biases are added. Rows begin at multiples
of 16 bytes. The gradient reads both products, of sigmoid the gate's alone. Source: Dauphin et al.
2017, Shazeer 2020.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.activations import activate, activation_gradient
from fusion_backend.kernels.common.rows import RESULTS, UNMEASURED
from fusion_backend.kernels.gemm.decode import decode, is_few
from fusion_backend.kernels.gemm.gradients import (
    as_matrices,
    bias_gradient,
    sum_of_products,
    weight_gradient,
    with_bias,
)
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.operands import reject_bias, reject_precision, reject_product
from fusion_backend.kernels.gemm.specialised_linear import tile_of
from fusion_backend.kernels.gemm.tiles import are_many

Act = Literal["sigmoid", "silu", "gelu", "gelu_tanh", "relu", "identity"]


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
    return (
        reject_dtypes(x=x, w1=w1, b1=b1, w2=w2, b2=b2)
        or reject_precision(x)
        or reject_product(x, w1=w1, w2=w2)
        or reject_bias(w1.shape[1], b1=b1, b2=b2)
    )


@gated_linear.worthwhile
def _(x, w1, b1, w2, b2, act, training):
    if act not in ("sigmoid", "silu") or not are_many(x):
        return UNMEASURED
    if tile_of(x, w1, act, w2).finishers:
        return UNMEASURED if training else None
    if training:
        return Reject(f"Inductor's training step is as fast ({RESULTS})")
    if len(w1) > 1024:
        return Reject(f"with {len(w1)} columns of x the library's product wins ({RESULTS})")
    return None


@gated_linear.kernel(saves=("gate", "up"))
def _(x, w1, b1, w2, b2, act, save):
    if not save and is_few(math.prod(x.shape[:-1])):
        return decode(x, w1, b1, act, w2, b2), x.new_empty(0), x.new_empty(0)
    return linear(x, w1, b1, act, w2=w2, b2=b2, save=(save, save and act != "sigmoid"))


@gated_linear.saved
def _(x, w1, b1, w2, b2, act):
    return x @ w1, x.new_empty(0) if act == "sigmoid" else x @ w2


@gated_linear.backward(plain=True, result=True)
def _(saved, dy):
    x, w1, w2 = saved.x, saved.w1, saved.w2
    dy, gate = dy.float(), with_bias(saved.gate, saved.b1)
    d_up = dy * activate(gate, saved.act)
    # sigmoid' = sigmoid · (1 - sigmoid): the result has the first factor, and 1 - sigmoid(gate) is
    # sigmoid(-gate), without cancellation
    if saved.act == "sigmoid":
        d_gate = dy * saved.result.float() * torch.sigmoid(-gate)
    else:
        rounded = x.element_size() == 2
        up = with_bias(saved.up, saved.b2)
        d_gate = activation_gradient(dy * up, gate, saved.act, rounded)
    unrounded = dict(b1=d_gate, b2=d_up)
    d_gate, d_up = d_gate.to(x.dtype), d_up.to(x.dtype)
    like = w1 if w1.dim() >= w2.dim() else w2
    rows, d_gate, d_up = as_matrices(x, d_gate, d_up, weight=like)
    grads = dict.fromkeys(("x", "w1", "b1", "w2", "b2"))
    if saved.needs["x"]:
        d_x = sum_of_products(d_gate, w1, d_up, w2)
        grads["x"] = d_x.sum_to_size(rows.shape).reshape(x.shape)
    for w, d in dict(w1=d_gate, w2=d_up).items():
        if saved.needs[w]:
            grads[w] = weight_gradient(rows, d, getattr(saved, w))
    # After the products, of what they read, as in linear_gradients: Inductor would else write the
    # gradients in fp32 as well. Biases in fp32, as autocast leaves them, get unrounded sums.
    for b, d in dict(b1=d_gate, b2=d_up).items():
        bias = getattr(saved, b)
        if bias is not None and saved.needs[b]:
            grads[b] = bias_gradient(unrounded[b] if bias.element_size() > 2 else d.float(), bias)
    return tuple(grads.values())


@gated_linear.inputs(dict(m=7, k=48, n=24), dict(m=16384, k=1024, n=4096))
def _(tensor, m, k, n, silu=0):
    act = "silu" if silu else "sigmoid"
    return tensor(m, k), tensor(k, n), tensor(n), tensor(k, n), tensor(n), act
