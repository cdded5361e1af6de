"""`fusion::specialised_gradient`, which runs the kernel of specialised_gradient_kernel.py: which
products it takes, and what it launches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import register_fake

from fusion_backend.kernels.gemm.specialised import (
    LIBRARY,
    Launch,
    compile_in_trial,
    memory_of,
    run,
    specialisable,
)
from fusion_backend.kernels.gemm.specialised_gradient_kernel import specialised_gradient_kernel
from fusion_backend.kernels.gemm.tiles import Tile

ACTIVATIONS = "relu relu_squared gelu gelu_tanh quick_gelu silu".split()
ROWS = 64  # of what is finished at a time: more take more registers than a thread has
REGISTERS = 160  # of a thread that finishes; with sums, some forms spill up to 32 bytes

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
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, filled: list[Tensor],
    sums: bool, tile: Tile,
) -> Launch:  # fmt: skip
    """The launch that fills what `fresh` has made."""
    given = [dy, w, pre, b, filled[0], filled[1] if sums else None]
    own = dict(ROWS=ROWS, ACT=act, REGISTERS=REGISTERS)
    return Launch(specialised_gradient_kernel, given, tile, own)


def specialised_gradient(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, sums: bool, tile: list[int]
) -> list[Tensor]:
    """What `hidden_gradient.hidden_gradient` computes, the sums still to be added up."""
    shape = Tile(*tile)
    filled = fresh(dy, pre, sums, shape)
    launched = launch_of(dy, w, pre, b, act, filled, sums, shape)
    run(launched, (act, sums, pre.data_ptr() % 16, pre.dtype, memory_of((w, b))))
    return filled


LIBRARY.impl("specialised_gradient", specialised_gradient, "CUDA")


@register_fake("fusion::specialised_gradient")
def _(dy, w, pre, b, act, sums, tile):
    filled = fresh(dy, pre, sums, Tile(*tile))
    compile_in_trial(launch_of(dy, w, pre, b, act, filled, sums, Tile(*tile)))
    return filled
