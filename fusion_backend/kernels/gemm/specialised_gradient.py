"""`fusion::specialised_gradient`, which runs the kernel of specialised_gradient_kernel.py: which
products it takes, and what it launches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import register_fake

from fusion_backend.kernels.common.launch import TRIAL, launch
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of
from fusion_backend.kernels.gemm.specialised import (
    LIBRARY,
    Launch,
    constants_of,
    memory_of,
    run,
    specialisable,
)
from fusion_backend.kernels.gemm.specialised_gradient_kernel import specialised_gradient_kernel
from fusion_backend.kernels.gemm.tiles import Tile, programs

ACTIVATIONS = "relu relu_squared gelu gelu_tanh quick_gelu silu".split()
ROWS = 64  # of what is finished at a time: more take more registers than a thread has
REGISTERS = 160  # of a thread that finishes

LIBRARY.define(
    "specialised_gradient(Tensor dy, Tensor w, Tensor pre, Tensor? b, str act, bool sums, "
    "int[] tile) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def takes_gradient(dy: Tensor, act: str) -> bool:
    """Can the kernel compute dy W · act'(pre)?"""
    return act in ACTIVATIONS and specialisable(dy)


def fresh(dy: Tensor, pre: Tensor, sums: bool, tile: Tile) -> list[Tensor]:
    """The gradient, and if asked for the sums that each warp has made of its columns in a tile, in
    fp32.
    """
    d = pre.new_empty(pre.shape)
    if not sums:
        return [d]
    tiles = (math.prod(dy.shape[:-1]) + tile.bm - 1) // tile.bm
    return [d, pre.new_empty((tiles * tile.finishers, pre.shape[-1]), dtype=torch.float32)]


def launch_of(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str,
    filled: list[Tensor], sums: bool, tile: Tile,
) -> Launch:  # fmt: skip
    """The launch of the kernel that fills what `fresh` has made."""
    (k, n), (rows, m, x_row) = w.shape, aligned_rows(dy)
    constants = dict(
        N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w), BY_OUTPUT=by_output(w), ACT=act,
        **constants_of(tile, REGISTERS), ROWS=ROWS,
    )  # fmt: skip
    args = [rows, w, pre, b, filled[0], filled[1] if sums else None, m]
    return programs(tile, m, n, dy.device), args, constants


def specialised_gradient(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, sums: bool, tile: list[int]
) -> list[Tensor]:
    """What `hidden_gradient.hidden_gradient` computes, the sums still to be added up."""
    shape = Tile(*tile)
    filled = fresh(dy, pre, sums, shape)
    run(
        specialised_gradient_kernel,
        (act, sums, pre.data_ptr() % 16, memory_of((w, b))),
        [dy, w, pre, b, filled[0], filled[1] if sums else None],
        w.shape[1],
        tile,
        lambda: launch_of(dy, w, pre, b, act, filled, sums, shape),
    )
    return filled


LIBRARY.impl("specialised_gradient", specialised_gradient, "CUDA")


@register_fake("fusion::specialised_gradient")
def _(dy, w, pre, b, act, sums, tile):
    shape = Tile(*tile)
    filled = fresh(dy, pre, sums, shape)
    if TRIAL.get() is not None:
        count, args, constants = launch_of(dy, w, pre, b, act, filled, sums, shape)
        launch(specialised_gradient_kernel, (count,), *args, **constants, num_warps=shape.warps)
    return filled
