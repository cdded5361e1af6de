"""What the forms of an MLP in training share, with dropout of its hidden layer and without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.gated_gradient import (
    gated_gradient,
    gated_gradient_tile,
    gated_hidden_layer,
)
from fusion_backend.kernels.gemm.gradients import (
    as_matrices,
    bias_gradient,
    sum_of_products,
    weight_gradient,
)
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.library import library_linear, library_takes
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.tiles import DEEP, LAUNCH
from fusion_backend.reporting.reject import Reject


def last_layer(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """h W + b in plain torch. Autocast adds the biases of h in fp32, and casts h to multiply it."""
    y = h.to(w.dtype) @ w
    return y if b is None else y + b


def hidden_layer(
    x: Tensor, w1: Tensor, b1: Tensor | None, act: str, save: bool, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """act(x W1 + b1), of which dropout may be made, and x W1, which is empty unless saved and where
    act is relu.
    """
    if act == "relu":  # where it is positive, h says as well as what it is made of
        if dropout is None and library_takes(x, w1, b1, act):
            return library_linear(x, w1, b1, act), x.new_empty(0)
        return linear(x, w1, b1, act, dropout=dropout)[0], x.new_empty(0)
    h, pre, _ = linear(x, w1, b1, act, save=(save, False), dropout=dropout)
    return h, pre


def mlp_gradients(saved: Any, dy: Tensor, scale: float = 1.0) -> tuple[Tensor | None, ...]:
    """Those of x, w1, b1, w2 and b2, from what the forward saved: its inputs, h and pre. scale:
    1 / (1 - p) of the dropout, if there is one.
    """
    needs, x, w1 = saved.needs, saved.x, saved.w1
    pre, b1 = (saved.h, None) if saved.act == "relu" else (saved.pre, saved.b1)
    d, sums = hidden_gradient(dy, saved.w2.t(), pre, b1, saved.act, needs["b1"], scale=scale)
    rows, h, d, d_y = as_matrices(x, saved.h, d, dy, weight=w1)
    return (
        (d @ w1.t()).view(x.shape) if needs["x"] else None,
        weight_gradient(rows, d, w1) if needs["w1"] else None,
        sums.to(saved.b1.dtype) if needs["b1"] else None,
        weight_gradient(h, d_y, saved.w2) if needs["w2"] else None,
        bias_gradient(dy.float(), saved.b2) if needs["b2"] else None,
    )


def reject_gated_tile(x: Tensor, w3: Tensor, act: str) -> Reject:
    """Why a block with a gate is left to the library, or that it was not timed."""
    if not gated_gradient_tile(x, w3.t(), act).finishers:
        return Reject(
            "the kernel of its backward is for Hopper GPUs, for products of "
            f"{LAUNCH * 1e6:.0f} µs or more that are sums of at least {DEEP} terms"
        )
    return UNMEASURED


def gated_mlp_gradients(saved: Any, dy: Tensor, scale: float = 1.0) -> tuple[Tensor | None, ...]:
    """Those of x, w1, b1, w2, b2, w3 and b3, from what the forward saved: its inputs, gate and up.
    scale: 1 / (1 - p) of the dropout, if there is one.
    """
    needs, x, w1, w2 = saved.needs, saved.x, saved.w1, saved.w2
    kept = saved.gate, saved.b1, saved.up, saved.b2, saved.act
    if any(needs[name] for name in ("x", "w1", "b1", "w2", "b2")):
        d_gate, d_up, h = gated_gradient(dy, saved.w3.t(), *kept, needs["w3"], scale=scale)
    else:
        d_gate = d_up = None
        h = gated_hidden_layer(*kept, scale)
    rows, d_gate, d_up, h, d_y = (
        None if t is None else t.flatten(0, -2) for t in (x, d_gate, d_up, h, dy)
    )
    # the sums for the biases come after the products and sum what those read (linear_gradients)
    return (
        sum_of_products(d_gate, w1, d_up, w2).view(x.shape) if needs["x"] else None,
        weight_gradient(rows, d_gate, w1) if needs["w1"] else None,
        bias_gradient(d_gate.float(), saved.b1) if needs["b1"] else None,
        weight_gradient(rows, d_up, w2) if needs["w2"] else None,
        bias_gradient(d_up.float(), saved.b2) if needs["b2"] else None,
        weight_gradient(h, d_y, saved.w3) if needs["w3"] else None,
        bias_gradient(dy.float(), saved.b3) if needs["b3"] else None,
    )
