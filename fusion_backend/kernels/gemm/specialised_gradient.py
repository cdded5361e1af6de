"""`fusion::specialised_gradient`, which runs the kernel of specialised_gradient_kernel.py: which
products it takes, and what it launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusion_backend.kernels.gemm.specialised import (
    Launch,
    compile_in_trial,
    define,
    empty,
    memory_of,
    run,
    specialisable,
)
from fusion_backend.kernels.gemm.specialised_gradient_kernel import specialised_gradient_kernel
from fusion_backend.kernels.gemm.tiles import Tile

ACTIVATIONS = "relu relu_squared gelu gelu_tanh quick_gelu silu".split()
ROWS = 64  # of what is finished at a time: more take more registers than a thread has
REGISTERS = 160  # of a thread that finishes; with sums, some forms spill up to 32 bytes


def takes_gradient(dy: Tensor, act: str) -> bool:
    """Can the kernel compute dy W · act'(pre)?"""
    return act in ACTIVATIONS and specialisable(dy)


def results(
    dy: Tensor, pre: Tensor, sums: bool, tile: Tile, make: Callable[..., Tensor]
) -> list[Tensor]:
    """Memory for the gradient, and if asked for the sums that each warp makes of its columns in a
    tile, in fp32.
    """
    d = make(pre, pre.shape)
    if not sums:
        return [d]
    tiles = (math.prod(dy.shape[:-1]) + tile.bm - 1) // tile.bm
    return [d, make(pre, (tiles * tile.finishers, pre.shape[-1]), dtype=torch.float32)]


def launch_of(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, scale: float,
    filled: list[Tensor], sums: bool, tile: Tile,
) -> Launch:  # fmt: skip
    """The launch that fills what `results` has made."""
    given = [dy, w, pre, b, filled[0], filled[1] if sums else None]
    own = dict(ROWS=ROWS, ACT=act, SCALE=scale, REGISTERS=REGISTERS)
    return Launch(specialised_gradient_kernel, given, tile, own)


def specialised_gradient(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, scale: float, sums: bool,
    tile: list[int],
) -> list[Tensor]:  # fmt: skip
    """What `hidden_gradient.hidden_gradient` computes, the sums still to be added up."""
    shape = Tile(*tile)
    filled = results(dy, pre, sums, shape, empty)
    launched = launch_of(dy, w, pre, b, act, scale, filled, sums, shape)
    run(launched, (act, scale, sums, pre.data_ptr() % 16, pre.dtype, memory_of((w, b))))
    return filled


def specialised_gradient_fake(dy, w, pre, b, act, scale, sums, tile):
    filled = results(dy, pre, sums, Tile(*tile), Tensor.new_empty)
    compile_in_trial(launch_of(dy, w, pre, b, act, scale, filled, sums, Tile(*tile)))
    return filled


define(
    "specialised_gradient(Tensor dy, Tensor w, Tensor pre, Tensor? b, str act, float scale, "
    "bool sums, int[] tile) -> Tensor[]",
    specialised_gradient,
    specialised_gradient_fake,
)
