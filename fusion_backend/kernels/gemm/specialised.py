"""`fusion::specialised_linear`, which runs the kernel of specialised_kernel.py: which products it
takes, and how it is launched.

Inductor writes the kernels that it launches into its own code as Triton's, and cannot do so with
one in Gluon: the operator is opaque to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import Library, register_fake

from fusion_backend.compat.triton import lend_scratch
from fusion_backend.kernels.common.launch import TRIAL, directly, interpreted, launch
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.kernels.gemm.epilogue import epilogue
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of
from fusion_backend.kernels.gemm.specialised_kernel import specialised_linear_kernel
from fusion_backend.kernels.gemm.tiles import Tile, programs, tile_for

HOPPER = 9  # compute capability
# without tanh, which takes more registers than the warps have that finish
ACTIVATIONS = "identity relu relu_squared gelu gelu_tanh quick_gelu silu sigmoid".split()
PART = 64  # columns that are stored at a time: a row of them is the 128 bytes of a swizzle
REGISTERS = 152  # of a thread that finishes

LIBRARY = Library("fusion", "FRAGMENT")
LIBRARY.define(
    "specialised_linear(Tensor x, Tensor w, Tensor? b, Tensor? w2, Tensor? b2, str act, "
    "bool save, bool save2, int[] tile) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)


def on_hopper(device: torch.device) -> bool:
    """Is the kernel written for this GPU? Tensors without data stand for those of an H200."""
    target = TARGET.get()
    if target is not None:
        return target.capability == HOPPER
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] == HOPPER
    return device.type == "meta"


def specialises(x: Tensor, w: Tensor, w2: Tensor | None, act: str) -> bool:
    """Can the kernel compute act(x W + b), or act(x W + b) · (x W2 + b2)?"""
    # the exact GELU of fp16 takes more registers than the warps have that finish
    spills = act == "gelu" and x.dtype == torch.float16 and w2 is None
    return (
        x.element_size() == 2
        and act in ACTIVATIONS
        and not spills
        and not interpreted(epilogue)  # a part of the kernel
        and (w2 is None or by_output(w2) == by_output(w))
        and on_hopper(x.device)
    )


def tile_of(x: Tensor, w: Tensor, act: str, w2: Tensor | None = None, able: bool = True) -> Tile:
    """The tile that `linear` takes for act(x W + b), or act(x W + b) · (x W2 + b2). able: is there
    nothing else to do, which the kernel cannot?
    """
    (k, n), rows, weights = w.shape, math.prod(x.shape[:-1]), 1 if w2 is None else 2
    return tile_for(x, rows, k, n, weights, act, able and specialises(x, w, w2, act))


def fresh(x: Tensor, w: Tensor, save: bool, save2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the products without their biases, empty unless they are kept."""
    shape = (*x.shape[:-1], w.shape[1])
    return (
        torch.empty(shape, dtype=x.dtype, device=x.device),
        *(torch.empty(shape if s else (0,), dtype=x.dtype, device=x.device) for s in (save, save2)),
    )


def launch_of(
    x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor | None, b2: Tensor | None, act: str,
    filled: tuple[Tensor, Tensor, Tensor], kept: tuple[bool, bool], tile: Tile,
) -> tuple[int, list, dict[str, object]]:  # fmt: skip
    """The launch of the kernel that fills what `fresh` has made: the number of programs, which walk
    through the tiles of the result, the arguments and the constants, both in the kernel's order.
    """
    (k, n), (rows, m, x_row) = w.shape, aligned_rows(x)
    saved = (t if keep else None for t, keep in zip(filled[1:], kept, strict=True))
    constants = dict(
        N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w),
        W2_STRIDE=0 if w2 is None else distance_of(w2), BY_OUTPUT=by_output(w), ACT=act,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=tile.group, STAGES=tile.stages, PART=PART,
        FINISHERS=tile.finishers, REGISTERS=REGISTERS,
    )  # fmt: skip
    return programs(tile, m, n, x.device), [rows, w, w2, b, b2, filled[0], *saved, m], constants


def start(
    x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor | None, b2: Tensor | None, act: str,
    filled: tuple[Tensor, Tensor, Tensor], kept: tuple[bool, bool], tile: Tile,
) -> None:  # fmt: skip
    """In a trial: compile the launch that `launch_of` describes."""
    count, args, constants = launch_of(x, w, b, w2, b2, act, filled, kept, tile)
    launch(specialised_linear_kernel, (count,), *args, **constants, num_warps=tile.warps)


# What was launched before, by all that it was compiled for. Triton would find it again, too, but
# would look at each argument and constant for that.
COMPILED: dict[tuple, tuple] = {}


def specialised_linear(
    x: Tensor, w: Tensor, b: Tensor | None, w2: Tensor | None, b2: Tensor | None, act: str,
    save: bool, save2: bool, tile: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `linear.linear` gives them, for what `specialises`."""
    filled = fresh(x, w, save, save2)
    given = x, w, w2, b, b2
    key = (
        x.device, x.dtype, act, save, save2, *tile,
        *(None if t is None else (t.data_ptr() % 16, t.shape, t.stride()) for t in given[1:]),
        x.data_ptr() % 16,
    )  # fmt: skip
    known = COMPILED.get(key) if x.is_contiguous() else None
    if known is not None:
        compiled, most, constants = known
        m = x.numel() // w.shape[0]
        saved = filled[1] if save else None, filled[2] if save2 else None
        count = min(most, Tile(*tile).number(m, w.shape[1]))
        lend_scratch()  # the backward may run in another thread, which has none yet
        compiled[count, 1, 1](*given, filled[0], *saved, m, *constants)
        return filled
    shape = Tile(*tile)
    count, args, named = launch_of(x, w, b, w2, b2, act, filled, (save, save2), shape)
    compiled = directly(specialised_linear_kernel, (count,), *args, **named, num_warps=shape.warps)
    dense = x.is_contiguous() and named["X_ROW"] == w.shape[0]  # one row may have any distance
    if compiled is not None and dense and args[0].data_ptr() == x.data_ptr():
        most = shape.programs * multiprocessors(x.device)
        COMPILED[key] = compiled, most, tuple(named.values())
    return filled


LIBRARY.impl("specialised_linear", specialised_linear, "CUDA")


@register_fake("fusion::specialised_linear")
def _(x, w, b, w2, b2, act, save, save2, tile):
    filled = fresh(x, w, save, save2)
    if TRIAL.get() is not None:
        start(x, w, b, w2, b2, act, filled, (save, save2), Tile(*tile))
    return filled
