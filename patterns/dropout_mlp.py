"""Two linear layers with an activation and dropout between them: dropout(act(x W1 + b1), p) W2 +
b2, the feed-forward block of T5, BART, wav2vec 2.0 and torch.nn.TransformerEncoderLayer. In
training only.

Shapes, dtypes and roundings are those of mlp. Forward drops what the first product activates before
it stores it; the mask is drawn as that of dropout_add, from a new seed at each call, and with other
bits than eager or plain Inductor. Forward keeps the hidden layer and, unless the activation is
relu, x W1, which says what was dropped. So backward neither reads a mask, as Inductor's does, nor
draws random numbers. Sources: Vaswani et al. 2017, Srivastava et al. 2014.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import dropout_scale, dropped, reject_dynamic
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.mlp import hidden_layer, last_layer, mlp_gradients
from fusion_backend.kernels.gemm.operands import reject_layers

Act = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu"]


def first_layer(x: Tensor, w1: Tensor, b1: Tensor | None, act: str) -> Tensor:
    y = x @ w1
    return activate(y if b1 is None else y + b1, act)


@Pattern
def dropout_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Act, p: float
) -> Tensor:
    return last_layer(F.dropout(first_layer(x, w1, b1, act), p, True), w2, b2)


@dropout_mlp.seeded
def _(x, w1, b1, w2, b2, act, p, seed):
    return last_layer(dropped(first_layer(x, w1, b1, act), seed, p), w2, b2)


@dropout_mlp.near_miss
def _(x, w1, b1, w2, b2, act, p):
    """dropout before the activation"""
    y = x @ w1
    h = activate(F.dropout(y if b1 is None else y + b1, p, True), act)
    return last_layer(h, w2, b2)


@dropout_mlp.near_miss
def _(x, w1, b1, w2, b2, act, p):
    """whole rows of the hidden layer dropped"""
    return last_layer(F.dropout1d(first_layer(x, w1, b1, act), p, True), w2, b2)


@dropout_mlp.guard
def _(x, w1, b1, w2, b2, act, p):
    layers = dict(w1=w1), dict(b1=b1), dict(w2=w2), dict(b2=b2)
    return reject_layers(x, *layers) or reject_dynamic(p=p)


@dropout_mlp.worthwhile
def _(x, w1, b1, w2, b2, act, p, training):
    return UNMEASURED


@dropout_mlp.kernel(saves=("pre", "h"))
def _(x, w1, b1, w2, b2, act, p, seed, save):
    h, pre = hidden_layer(x, w1, b1, act, save, Dropout(seed, p))
    return F.linear(h, w2.t(), b2), pre, h


@dropout_mlp.backward
def _(saved, dy):
    return mlp_gradients(saved, dy, dropout_scale(saved.p))


@dropout_mlp.inputs(dict(m=5, k=48, n=24, o=16), dict(m=16384, k=1024, n=4096, o=1024))
def _(tensor, m, k, n, o):
    return tensor(m, k), tensor(k, n), tensor(n), tensor(n, o), tensor(o), "gelu", 0.1
