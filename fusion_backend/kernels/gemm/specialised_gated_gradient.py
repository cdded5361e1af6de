"""`fusion::specialised_gated_gradient`, which runs the kernel of
specialised_gated_gradient_kernel.py: which products it takes, and what it launches.
"""

from __future__ import annotations

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
from fusion_backend.kernels.gemm.specialised_gated_gradient_kernel import (
    specialised_gated_gradient_kernel,
)
from fusion_backend.kernels.gemm.tiles import Tile

ACTIVATIONS = "relu gelu gelu_tanh silu".split()
REGISTERS = 160  # of a thread that finishes
LONG = 2048  # the least K of which fewer rows are finished at a time


def takes_gated_gradient(dy: Tensor, act: str) -> bool:
    """Can the kernel compute the gradients of act(gate) · up from dy W?"""
    return act in ACTIVATIONS and specialisable(dy)


def rows_at_a_time(k: int, act: str) -> int:
    """How many rows are finished at a time. In trials on an H200, with silu, 64 were faster where K
    was 1024 or less, and 32 where it was 2048 or more; nothing between them was timed, and no file
    has these trials. With 64, some forms with the other activations spill registers.
    """
    return 64 if k < LONG and act in ("silu", "gelu_tanh") else 32


def launch_of(
    dy: Tensor, w: Tensor, gate: Tensor, up: Tensor, b: Tensor | None, b2: Tensor | None, act: str,
    scale: float, filled: list[Tensor], tile: Tile,
) -> Launch:  # fmt: skip
    """The launch that fills the gradients of gate and up, and the hidden layer if it is wanted."""
    own = dict(ROWS=rows_at_a_time(len(w), act), ACT=act, SCALE=scale, REGISTERS=REGISTERS)
    hidden = filled[2] if len(filled) == 3 else None
    given = [dy, w, gate, up, b, b2, *filled[:2], hidden]
    return Launch(specialised_gated_gradient_kernel, given, tile, own)


def specialised_gated_gradient(
    dy: Tensor, w: Tensor, gate: Tensor, up: Tensor, b: Tensor | None, b2: Tensor | None, act: str,
    scale: float, hidden: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    """What `gated_gradient.gated_gradient` computes, without what is not wanted."""
    filled = [empty(gate, gate.shape) for _ in range(2 + hidden)]
    launched = launch_of(dy, w, gate, up, b, b2, act, scale, filled, Tile(*tile))
    aligned = gate.data_ptr() % 16, up.data_ptr() % 16
    run(launched, (act, scale, hidden, aligned, gate.dtype, up.dtype, memory_of((w, b, b2))))
    return filled


def specialised_gated_gradient_fake(dy, w, gate, up, b, b2, act, scale, hidden, tile):
    filled = [gate.new_empty(gate.shape) for _ in range(2 + hidden)]
    compile_in_trial(launch_of(dy, w, gate, up, b, b2, act, scale, filled, Tile(*tile)))
    return filled


define(
    "specialised_gated_gradient(Tensor dy, Tensor w, Tensor gate, Tensor up, Tensor? b, "
    "Tensor? b2, str act, float scale, bool hidden, int[] tile) -> Tensor[]",
    specialised_gated_gradient,
    specialised_gated_gradient_fake,
)
