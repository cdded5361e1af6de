"""A feed-forward block with a gate, in training: (act(x W1 + b1) · (x W2 + b2)) W3 + b3, that of
Llama, Qwen, Mistral and Gemma.

x is `[..., k]`, W1 and W2 `[k, n]`, W3 `[n, o]`, all with dense rows or columns; b1 and b2 `[n]`
and b3 `[o]` may be missing. bf16 or fp16; sums in fp32, rounded once. Where tiles have finishers
(kernels/gemm/tiles.py), which is on Hopper, the products are rounded as well, before their biases
are added; dy W3ᵀ always is. Rows begin at multiples of 16 bytes.
Forward keeps both products; Inductor may keep the hidden layer as well. In backward the product
dy W3ᵀ applies the product rule and the derivative of the activation before it stores anything, and
computes the hidden layer again for the gradient of W3. Without gradients gated_linear is all that
can be fused, and so it is where tiles have no finishers: there the library multiplies in backward,
and the rest is Inductor's, also under fusion.gate=always. Source: Shazeer 2020.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, Reject, Replacement
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.mlp import gated_mlp_gradients, last_layer, reject_gated_tile
from fusion_backend.kernels.gemm.operands import reject_layers

Act = Literal["silu", "gelu", "gelu_tanh", "relu"]
ONLY_TRAINING = Reject("without gradients nothing more than its first half can be fused")


@Pattern
def gated_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, w3: Tensor,
    b3: Tensor | None, act: Act,
) -> Tensor:  # fmt: skip
    gate, up = x @ w1, x @ w2
    gate = gate if b1 is None else gate + b1
    up = up if b2 is None else up + b2
    return last_layer(activate(gate, act) * up, w3, b3)


@gated_mlp.near_miss
def _(x, w1, b1, w2, b2, w3, b3, act):
    """the sum of the two"""
    y = (activate(x @ w1, act) + x @ w2) @ w3
    return y if b3 is None else y + b3


@gated_mlp.near_miss
def _(x, w1, b1, w2, b2, w3, b3, act):
    """the activation of what is gated"""
    y = activate((x @ w1) * (x @ w2), act) @ w3
    return y if b3 is None else y + b3


@gated_mlp.near_miss
def _(x, w1, b1, w2, b2, w3, b3, act):
    """another hidden layer"""
    y = (activate(x @ w1, act) * (x @ w2)).flip(-1) @ w3
    return y if b3 is None else y + b3


@gated_mlp.replacement
def _(x, w1, b1, w2, b2, w3, b3, act, training):
    args = x, w1, b1, w2, b2, w3, b3, act
    return Replacement(gated_mlp, args) if training else ONLY_TRAINING


@gated_mlp.guard
def _(x, w1, b1, w2, b2, w3, b3, act):
    return reject_layers(x, dict(w1=w1, w2=w2), dict(b1=b1, b2=b2), dict(w3=w3), dict(b3=b3))


@gated_mlp.worthwhile
def _(x, w1, b1, w2, b2, w3, b3, act, training):
    return reject_gated_tile(x, w3, act)


@gated_mlp.kernel(saves=("gate", "up"))
def _(x, w1, b1, w2, b2, w3, b3, act, save):
    h, gate, up = linear(x, w1, b1, act, w2=w2, b2=b2, save=(save, save))
    return F.linear(h, w3.t(), b3), gate, up


@gated_mlp.saved
def _(x, w1, b1, w2, b2, w3, b3, act):
    return x @ w1, x @ w2


@gated_mlp.backward
def _(saved, dy):
    return gated_mlp_gradients(saved, dy)


@gated_mlp.inputs(dict(m=5, k=48, n=24, o=16), dict(m=16384, k=1024, n=4096, o=1024))
def _(tensor, m, k, n, o):
    first = tensor(m, k), tensor(k, n), tensor(n), tensor(k, n), tensor(n)
    return *first, tensor(n, o), tensor(o), "silu"
