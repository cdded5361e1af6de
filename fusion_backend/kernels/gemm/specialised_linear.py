"""`fusion::specialised_linear`, which runs the kernel of specialised_linear_kernel.py: which
products it takes, and what it launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusion_backend.kernels.common.dropout import Dropout, dropout_arguments
from fusion_backend.kernels.gemm.operands import by_output, distance_of
from fusion_backend.kernels.gemm.specialised import (
    Launch,
    compile_in_trial,
    define,
    empty,
    memory_of,
    run,
    specialisable,
)
from fusion_backend.kernels.gemm.specialised_linear_kernel import specialised_linear_kernel
from fusion_backend.kernels.gemm.tiles import Tile, tile_for

# without tanh, which takes more registers than the warps have that finish
ACTIVATIONS = "identity relu relu_squared gelu gelu_tanh quick_gelu silu sigmoid".split()
REGISTERS = 152  # of a thread that finishes


def specialises(x: Tensor, w: Tensor, w2: Tensor | None, act: str) -> bool:
    """Can the kernel compute act(x W + b), or act(x W + b) · (x W2 + b2)?"""
    # the exact GELU of fp16 takes more registers than the warps have that finish
    spills = act == "gelu" and x.dtype == torch.float16 and w2 is None
    return (
        act in ACTIVATIONS
        and not spills
        and (w2 is None or by_output(w2) == by_output(w))
        and specialisable(x)
    )


def tile_of(x: Tensor, w: Tensor, act: str, w2: Tensor | None = None, able: bool = True) -> Tile:
    """The tile that `linear` takes for act(x W + b), or act(x W + b) · (x W2 + b2). able: is there
    nothing else to do, which the kernel cannot?
    """
    (k, n), rows, weights = w.shape, math.prod(x.shape[:-1]), 1 if w2 is None else 2
    return tile_for(x, rows, k, n, weights, act, able and specialises(x, w, w2, act))


def results(
    x: Tensor, w: Tensor, kept: tuple[bool, bool], make: Callable[..., Tensor]
) -> list[Tensor]:
    """Memory for the result, and for the products without their biases that are kept."""
    shape = (*x.shape[:-1], w.shape[1])
    return [make(x, shape) for keep in (True, *kept) if keep]


def launch_of(
    x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dropout: Dropout | None, act: str, filled: list[Tensor], kept: tuple[bool, bool], tile: Tile,
) -> Launch:  # fmt: skip
    """The launch that fills what `results` has made."""
    left = iter(filled)
    places = (next(left) if keep else None for keep in (True, *kept))
    seed, numbers = dropout_arguments(dropout)
    stride = 0 if w2 is None else distance_of(w2)
    own = dict(W2_STRIDE=stride, ACT=act, **numbers, REGISTERS=REGISTERS)
    return Launch(specialised_linear_kernel, [x, w, w2, b, b2, seed, *places], tile, own)


def specialised_linear(
    x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    seed: Tensor | None, p: float, act: str, save: bool, save2: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    """What `linear.linear` computes, for what `specialises`, without what is not kept."""
    filled, kept = results(x, w, (save, save2), empty), (save, save2)
    dropout = None if seed is None else Dropout(seed, p)
    launched = launch_of(x, w, b, w2, b2, dropout, act, filled, kept, Tile(*tile))
    run(launched, (p, act, save, save2, memory_of((w, w2, b, b2, seed))))
    return filled


def specialised_linear_fake(x, w, b, w2, b2, seed, p, act, save, save2, tile):
    filled, kept = results(x, w, (save, save2), Tensor.new_empty), (save, save2)
    dropout = None if seed is None else Dropout(seed, p)
    compile_in_trial(launch_of(x, w, b, w2, b2, dropout, act, filled, kept, Tile(*tile)))
    return filled


define(
    "specialised_linear(Tensor x, Tensor w, Tensor? b, Tensor? w2, Tensor? b2, Tensor? seed, "
    "float p, str act, bool save, bool save2, int[] tile) -> Tensor[]",
    specialised_linear,
    specialised_linear_fake,
)
