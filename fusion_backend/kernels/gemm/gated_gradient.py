"""The gradients that come back into the hidden layer of a block with a gate, act(gate) · up. One
pass makes those of gate and up from dy W₃ᵀ, and computes the hidden layer again, which the forward
need not keep.

With dh = dy W₃ᵀ: d_gate = dh · up · act'(gate), d_up = dh · act(gate), both times the scale of
dropout. Computed in fp32, rounded once; dh is rounded first. 16-bit dtypes. Where the tile has no
finishers the library multiplies, and the rest is plain torch code, which Inductor makes one kernel
of.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusion_backend.kernels.common.activations import activate, activation_gradient
from fusion_backend.kernels.gemm.gradients import with_bias
from fusion_backend.kernels.gemm.specialised_gated_gradient import takes_gated_gradient
from fusion_backend.kernels.gemm.tiles import Tile, tile_for


def gated_gradient(
    dy: Tensor, w: Tensor, gate: Tensor, b: Tensor | None, up: Tensor, b2: Tensor | None, act: str,
    hidden: bool, tile: Tile | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of gate and up, and act(gate + b) · (up + b2) · scale, which is None unless
    asked for.

    dy is `[..., o]`, w `[o, n]`, W₃ transposed; gate and up `[..., n]`, b and b2 `[n]` or None.
    scale: 1 / (1 - p) of the dropout behind the gate, if there is one; gate is `epilogue.LOWEST`
    where it dropped an element. All results are contiguous.
    """
    tile = gated_gradient_tile(dy, w, act) if tile is None else tile
    gate, up = gate.contiguous(), up.contiguous()
    if tile.finishers:
        op = torch.ops.fusion.specialised_gated_gradient
        d_gate, d_up, *h = op(dy, w, gate, up, b, b2, act, scale, hidden, list(tile))
        return d_gate, d_up, h[0] if hidden else None
    kind, dh = gate.dtype, (dy @ w).float() * scale
    gate, up = with_bias(gate, b), with_bias(up, b2)
    active = activate(gate, act)
    d_gate = activation_gradient(dh * up, gate, act, True)
    h = (active * up * scale).to(kind) if hidden else None
    return d_gate.to(kind), (dh * active).to(kind), h


def gated_hidden_layer(
    gate: Tensor, b: Tensor | None, up: Tensor, b2: Tensor | None, act: str, scale: float = 1.0
) -> Tensor:
    return (activate(with_bias(gate, b), act) * with_bias(up, b2) * scale).to(gate.dtype)


def gated_gradient_tile(like: Tensor, w: Tensor, act: str) -> Tile:
    """Of dy W, where dy has the rows and the dtype of `like`."""
    (k, n), rows = w.shape, math.prod(like.shape[:-1])
    return tile_for(like, rows, k, n, specialised=takes_gated_gradient(like, act))
