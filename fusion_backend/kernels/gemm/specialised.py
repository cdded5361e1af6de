"""What the warp-specialised kernels have in common: where they run, and how they are launched.

Inductor writes the kernels that it launches into its own code as Triton's, and cannot do so with
one in Gluon: the operators that launch these are opaque to it. Its code calls the functions behind
them directly, and a kernel that was launched before is launched as Inductor launches its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_fake

from fusion_backend.compat.direct_calls import call_directly
from fusion_backend.compat.launchers import relauncher
from fusion_backend.compat.torch import empty_cuda
from fusion_backend.compat.triton import current_stream
from fusion_backend.kernels.common.launch import TRIAL, directly, interpreted, launch
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.kernels.gemm.epilogue import epilogue
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of
from fusion_backend.kernels.gemm.tiles import Tile, programs

HOPPER = 9  # compute capability
PART = 64  # columns that are stored at a time: a row of them is the 128 bytes of a swizzle

LIBRARY = Library("fusion", "FRAGMENT")


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


class Launch(NamedTuple):
    """given: the kernel's arguments but for the number of rows, which comes last; the first is x
    `[..., k]`, the second the weight `[k, n]`. own: its constants behind those of both kernels.
    """

    kernel: Any
    given: list
    tile: Tile
    own: dict[str, Any]

    def whole(self) -> tuple[int, list, dict[str, Any]]:
        """The number of programs, which walk through the tiles of the result, the arguments and the
        constants, both in the kernel's order.
        """
        x, w, *others = self.given
        (k, n), (rows, m, x_row), tile = w.shape, aligned_rows(x), self.tile
        constants = dict(
            N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w), BY_OUTPUT=by_output(w), BM=tile.bm,
            BN=tile.bn, BK=tile.bk, GROUP=tile.group, STAGES=tile.stages, PART=PART,
            FINISHERS=tile.finishers, **self.own,
        )  # fmt: skip
        return programs(tile, m, n, x.device), [rows, w, *others, m], constants


def compile_in_trial(launched: Launch) -> None:
    if TRIAL.get() is not None:
        count, args, constants = launched.whole()
        launch(launched.kernel, (count,), *args, **constants, num_warps=launched.tile.warps)


def memory_of(tensors: tuple[Tensor | None, ...]) -> tuple:
    """What a launch is compiled for, of tensors whose shapes are constants."""
    return tuple(
        None if t is None else (t.data_ptr() % 16, t.dtype, t.shape, t.stride()) for t in tensors
    )


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor, made as Inductor's code makes one where that is possible."""
    if not like.is_cuda or like.device.index != torch.cuda.current_device():
        return like.new_empty(shape, dtype=dtype)
    distances, distance = [], 1
    for size in reversed(shape):
        distances.append(distance)
        distance *= max(size, 1)
    # it takes tuples alone, and torch.Size is another class
    return empty_cuda(tuple(shape), tuple(distances[::-1]), dtype or like.dtype)


# How to launch again what was launched before, by all that it was compiled for. Triton would find
# it again, too, but would look at each argument and constant for that.
KNOWN: dict[tuple, tuple] = {}


def run(launched: Launch, key: tuple) -> None:
    """Launch a kernel. key: all that it is compiled for, but for x, the tile and the kernel."""
    kernel, given, tile, _ = launched
    x, n = given[0], given[1].shape[1]
    if x.is_cuda and torch.cuda.current_device() != x.device.index:
        with torch.cuda.device(x.device):
            run(launched, key)
        return
    key = (kernel.__name__, x.device, x.dtype, x.data_ptr() % 16, tile, *key)
    known = KNOWN.get(key) if x.is_contiguous() else None
    if known is not None:
        relaunch, most = known
        m = x.numel() // x.shape[-1]
        relaunch(min(most, tile.number(m, n)), current_stream(x.device), (*given, m))
        return
    count, args, named = launched.whole()
    compiled = directly(kernel, (count,), *args, **named, num_warps=tile.warps)
    dense = x.is_contiguous() and named["X_ROW"] == x.shape[-1]  # one row may have any distance
    if compiled is not None and dense and args[0].data_ptr() == x.data_ptr():
        most = tile.programs * multiprocessors(x.device)
        KNOWN[key] = relauncher(compiled, tuple(named.values())), most


def define(schema: str, function: Callable, fake: Callable) -> None:
    """Define an operator fusion::… that `function` computes on a GPU."""
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    name = schema.partition("(")[0]
    LIBRARY.impl(name, function, "CUDA")
    register_fake(f"fusion::{name}")(fake)
    call_directly(getattr(torch.ops.fusion, name).default, function)
