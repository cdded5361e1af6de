"""What the warp-specialised kernels have in common: where they run, and how they are launched.

Inductor writes the kernels that it launches into its own code as Triton's, and cannot do so with
one in Gluon: the operators that launch these are opaque to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fusion_backend.compat.triton import launch_again
from fusion_backend.kernels.common.launch import directly, interpreted
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.kernels.gemm.epilogue import epilogue
from fusion_backend.kernels.gemm.tiles import Tile

HOPPER = 9  # compute capability
PART = 64  # columns that are stored at a time: a row of them is the 128 bytes of a swizzle

LIBRARY = Library("fusion", "FRAGMENT")

# The number of programs, which walk through the tiles of the result, the arguments and the
# constants, both in the kernel's order. The last argument is the number of rows.
Launch = tuple[int, list, dict[str, Any]]


def specialisable(x: Tensor) -> bool:
    """Are the kernels written for these elements and this GPU, and compiled?"""
    # the epilogue is a part of them
    return x.element_size() == 2 and not interpreted(epilogue) and on_hopper(x.device)


def on_hopper(device: torch.device) -> bool:
    """Tensors without data stand for those of an H200."""
    target = TARGET.get()
    if target is not None:
        return target.capability == HOPPER
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] == HOPPER
    return device.type == "meta"


def constants_of(tile: Tile, registers: int) -> dict[str, int]:
    """Those of a launch that follow from its tile, in the order of both kernels. registers: of a
    thread that finishes.
    """
    return dict(
        BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=tile.group, STAGES=tile.stages, PART=PART,
        FINISHERS=tile.finishers, REGISTERS=registers,
    )  # fmt: skip


def memory_of(tensors: tuple[Tensor | None, ...]) -> tuple:
    """What a launch is compiled for, of tensors whose shapes are constants."""
    return tuple(None if t is None else (t.data_ptr() % 16, t.shape, t.stride()) for t in tensors)


# What was launched before, by all that it was compiled for. Triton would find it again, too, but
# would look at each argument and constant for that.
COMPILED: dict[tuple, tuple] = {}


def run(
    kernel: Any, key: tuple, given: list, n: int, tile: list[int], describe: Callable[[], Launch]
) -> None:
    """Launch what `describe` describes. given: its arguments if the first, whose rows are
    multiplied, is dense; n: columns of the result; key: what it is compiled for, but for the first
    and the tile.
    """
    x = given[0]
    key = (kernel.__name__, x.device, x.dtype, x.data_ptr() % 16, *tile, *key)
    known = COMPILED.get(key) if x.is_contiguous() else None
    if known is not None:
        compiled, most, rows, across, constants = known
        m = x.numel() // x.shape[-1]
        programs = min(most, (m + rows - 1) // rows * across)
        launch_again(compiled, programs, x.device, (*given, m, *constants))
        return
    count, args, named = describe()
    shape = Tile(*tile)
    compiled = directly(kernel, (count,), *args, **named, num_warps=shape.warps)
    dense = x.is_contiguous() and named["X_ROW"] == x.shape[-1]  # one row may have any distance
    if compiled is not None and dense and args[0].data_ptr() == x.data_ptr():
        most, across = shape.programs * multiprocessors(x.device), -(-n // shape.bn)
        COMPILED[key] = compiled, most, shape.bm, across, tuple(named.values())
