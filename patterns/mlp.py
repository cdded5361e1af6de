"""Two linear layers with an activation between them, in training: act(x W1 + b1) W2 + b2, the
feed-forward block of transformers.

x is `[..., k]`, W1 `[k, n]`, W2 `[n, o]`, both with dense rows or columns; b1 `[n]` and b2 `[o]`
may be missing. bf16 or fp16; sums in fp32, rounded once. Where tiles have finishers
(kernels/gemm/tiles.py), which is on Hopper, x W1 is rounded as well, before b1 is added, and dy W2ᵀ
before it is multiplied by the derivative. Rows begin at multiples of 16 bytes.
Forward keeps the hidden layer and x W1, as Inductor does. In backward the product dy W2ᵀ applies
the derivative of the activation before it stores anything, and sums the columns for the gradient of
b1. Without gradients linear_act is all that can be fused. Source: Vaswani et al. 2017.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject, Replacement
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.mlp import hidden_layer, last_layer, mlp_gradients
from fusion_backend.kernels.gemm.operands import reject_layers

Act = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu"]
ONLY_TRAINING = Reject("without gradients nothing more than its first half can be fused")


@Pattern
def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Act
) -> Tensor:
    y = x @ w1
    return last_layer(activate(y if b1 is None else y + b1, act), w2, b2)


@mlp.near_miss
def _(x, w1, b1, w2, b2, act):
    """the activation afterwards"""
    y = x @ w1
    return activate(last_layer(y if b1 is None else y + b1, w2, b2), act)


@mlp.near_miss
def _(x, w1, b1, w2, b2, act):
    """another hidden layer"""
    y = x @ w1
    return last_layer(activate(y if b1 is None else y + b1, act).flip(-1), w2, b2)


@mlp.replacement
def _(x, w1, b1, w2, b2, act, training):
    return Replacement(mlp, (x, w1, b1, w2, b2, act)) if training else ONLY_TRAINING


@mlp.guard
def _(x, w1, b1, w2, b2, act):
    return reject_layers(x, dict(w1=w1), dict(b1=b1), dict(w2=w2), dict(b2=b2))


@mlp.worthwhile
def _(x, w1, b1, w2, b2, act, training):
    return UNMEASURED


@mlp.kernel(saves=("pre", "h"))
def _(x, w1, b1, w2, b2, act, save):
    h, pre = hidden_layer(x, w1, b1, act, save)
    return F.linear(h, w2.t(), b2), pre, h


@mlp.saved
def _(x, w1, b1, w2, b2, act):
    y = x @ w1
    h = activate(y if b1 is None else y + b1, act)
    return x.new_empty(0) if act == "relu" else y, h


@mlp.backward
def _(saved, dy):
    return mlp_gradients(saved, dy)


@mlp.inputs(dict(m=5, k=48, n=24, o=16), dict(m=16384, k=1024, n=4096, o=1024))
def _(tensor, m, k, n, o):
    return tensor(m, k), tensor(k, n), tensor(n), tensor(n, o), tensor(o), "gelu"
