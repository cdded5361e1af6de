"""A feed-forward block with a gate and dropout behind it: dropout(act(x W1 + b1) · (x W2 + b2), p)
W3 + b3, that of T5 1.1, Flan-T5, mT5 and UMT5. In training only.

Shapes, dtypes, roundings and tiles are those of gated_mlp, the mask is drawn as that of
dropout_mlp. Forward keeps both products; that of the gate says what was dropped, so that backward
neither reads a mask nor draws random numbers. Sources: Shazeer 2020, Srivastava et al. 2014.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import dropout_scale, dropped, reject_dynamic
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.mlp import gated_mlp_gradients, last_layer, reject_gated_tile
from fusion_backend.kernels.gemm.operands import reject_layers

Act = Literal["silu", "gelu", "gelu_tanh", "relu"]


def gated_layer(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: str
) -> Tensor:
    gate, up = x @ w1, x @ w2
    gate = gate if b1 is None else gate + b1
    return activate(gate, act) * (up if b2 is None else up + b2)


@Pattern
def dropout_gated_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, w3: Tensor,
    b3: Tensor | None, act: Act, p: float,
) -> Tensor:  # fmt: skip
    return last_layer(F.dropout(gated_layer(x, w1, b1, w2, b2, act), p, True), w3, b3)


@dropout_gated_mlp.seeded
def _(x, w1, b1, w2, b2, w3, b3, act, p, seed):
    return last_layer(dropped(gated_layer(x, w1, b1, w2, b2, act), seed, p), w3, b3)


@dropout_gated_mlp.near_miss
def _(x, w1, b1, w2, b2, w3, b3, act, p):
    """dropout of the gate, before its activation"""
    h = activate(F.dropout(x @ w1, p, True), act) * (x @ w2)
    return last_layer(h, w3, b3)


@dropout_gated_mlp.near_miss
def _(x, w1, b1, w2, b2, w3, b3, act, p):
    """dropout of the result"""
    return F.dropout(last_layer(gated_layer(x, w1, b1, w2, b2, act), w3, b3), p, True)


@dropout_gated_mlp.guard
def _(x, w1, b1, w2, b2, w3, b3, act, p):
    layers = dict(w1=w1, w2=w2), dict(b1=b1, b2=b2), dict(w3=w3), dict(b3=b3)
    return reject_layers(x, *layers) or reject_dynamic(p=p)


@dropout_gated_mlp.worthwhile
def _(x, w1, b1, w2, b2, w3, b3, act, p, training):
    return reject_gated_tile(x, w3, act)


@dropout_gated_mlp.kernel(saves=("gate", "up"))
def _(x, w1, b1, w2, b2, w3, b3, act, p, seed, save):
    kept = dict(save=(save, save), dropout=Dropout(seed, p))
    h, gate, up = linear(x, w1, b1, act, w2=w2, b2=b2, **kept)
    return F.linear(h, w3.t(), b3), gate, up


@dropout_gated_mlp.backward
def _(saved, dy):
    return gated_mlp_gradients(saved, dy, dropout_scale(saved.p))


@dropout_gated_mlp.inputs(dict(m=5, k=48, n=24, o=16), dict(m=16384, k=1024, n=4096, o=1024))
def _(tensor, m, k, n, o):
    first = tensor(m, k), tensor(k, n), tensor(n), tensor(k, n), tensor(n)
    return *first, tensor(n, o), tensor(o), "gelu_tanh", 0.1
