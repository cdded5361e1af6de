"""What kernels on rows share: their configurations, guards, grids, and masks that broadcast."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from fusion_backend.kernels.common.inputs import dynamic, number, same_sizes
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.kernels.common.tuned import TABLE
from fusion_backend.reporting.reject import Reject, Unmeasured

RESULTS = "benchmarks/results"
UNMEASURED = Unmeasured("its kernel has not been timed at such sizes; fusion.gate=always takes it")
FEW = 1024  # rows that leave a GPU waiting for one read after another
MAX_ROW = 131072  # the longest row accepted
MAX_HELD = 65536  # bytes of the longest row that stays in the registers of one program


class Config(NamedTuple):
    """Of a kernel on rows. A block shorter than the row: the program walks through the row."""

    block: int
    rows: int  # a program
    warps: int
    programs: int = 0  # a multiprocessor, which walk through the rows; 0: all rows at once
    stages: int = 0  # of the loop over rows
    early: bool = False  # weight and bias are read before the rows (norms)


def row_config(n: int, itemsize: int) -> tuple[int, int, int]:
    """For rows of n elements: BLOCK, how many rows a program takes, and its warps.

    16 elements a thread, but at least four warps. A BLOCK shorter than the row: the row does not
    fit in registers, the program walks through it.
    """
    block = triton.next_power_of_2(n)
    if n * itemsize > MAX_HELD:
        return 8192, 1, 16
    return block, max(1, 2048 // block), min(32, max(4, block // 512))


def tuned(kernel: str, rows, n: int, itemsize: int, rule: tuple) -> Config:
    """What the table has for the kernel and rows of n, else what the rule gives."""
    few = ", few rows" if not dynamic(rows) and rows < FEW else ""
    block = triton.next_power_of_2(n)
    found = TABLE.get(kernel + few, {}).get(block) if itemsize == 2 else None
    return Config(**dict(block=block) | found) if found else Config(*rule)


def reject_rows(x: Tensor) -> Reject | None:
    """Refuse rows whose length is dynamic or more than 131072, or whose elements are not adjacent
    in memory.
    """
    if x.dim() == 0:
        return Reject("x is a single number")
    n = number(x.shape[-1])
    if dynamic(n):
        return Reject("the row length is dynamic")
    if not 1 <= n <= MAX_ROW:
        return Reject(f"a row of {n} is not between 1 and {MAX_ROW}")
    if dynamic(x.stride(-1)) or (x.stride(-1) != 1 and n > 1):
        return Reject(f"the elements of a row are {x.stride(-1)} apart")


def reject_shapes(**tensors: Tensor) -> Reject | None:
    """Refuse tensors whose shapes are not known to be equal."""
    (first, x), *others = tensors.items()
    for name, t in others:
        if t.dim() != x.dim() or not statically_known_true(sym_eq(tuple(t.shape), tuple(x.shape))):
            return Reject(f"{first} has shape {tuple(x.shape)} and {name} {tuple(t.shape)}")


def reject_vectors(length: int | torch.SymInt, /, **vectors: Tensor | None) -> Reject | None:
    """Refuse weights and biases that are not dense vectors known to be of this length; None passes.
    Code may broadcast a vector of one element, which a kernel would read beyond its end.
    """
    for name, t in vectors.items():
        if t is None:
            continue
        if t.dim() != 1 or dynamic(t.stride(0)) or t.stride(0) != 1:
            return Reject(
                f"{name} with shape {tuple(t.shape)} and strides {t.stride()} is not a plain vector"
            )
        if not same_sizes(t.shape, (length,)):
            return Reject(f"{name} has {t.shape[0]} elements, not {length}")


def reject_broadcast(x: Tensor, name: str, other: Tensor | None) -> Reject | None:
    """Refuse what Broadcast cannot describe."""
    if other is None:
        return None
    if x.dim() > 4 or other.dim() > x.dim():
        return Reject(
            f"{name} has {other.dim()} dimensions and x {x.dim()}; the kernel takes up to 4"
        )
    for mine, its in zip(reversed(x.shape), reversed(other.shape), strict=False):
        if not statically_known_true(its == mine) and not statically_known_true(its == 1):
            return Reject(
                f"{name} with shape {tuple(other.shape)} may or may not broadcast to "
                f"{tuple(x.shape)}"
            )


class Broadcast:
    """How a kernel reads `other` at a row and column of x `[a, heads, length, n]` without a copy.

    sizes: heads and length. strides: of the four dimensions, 0 where other broadcasts. x and other
    may have fewer dimensions, which are the last ones.
    """

    def __init__(self, x: Tensor, other: Tensor | None):
        self.tensor = other
        shape = [1] * (4 - x.dim()) + list(x.shape)
        self.sizes = shape[1:3] if other is not None else [1, 1]
        self.strides = [0] * 4
        for i in range(other.dim() if other is not None else 0):
            its = other.shape[-1 - i]
            alone = statically_known_true(its == 1) and not statically_known_true(
                shape[-1 - i] == 1
            )
            self.strides[-1 - i] = 0 if alone else other.stride(-1 - i)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU that decisions are made for. Tensors without data are taken to be on an H200, so
    that what it would run can be compiled without one.
    """
    target = TARGET.get()
    if target is not None:
        return target.multiprocessors
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 4


def grid(rows, rows_each: int, programs: int, device: torch.device):
    """A program for rows_each rows; with `programs`, so many a multiprocessor at most, which walk
    through the rows.
    """
    every, most = (rows + rows_each - 1) // rows_each, programs * multiprocessors(device)
    return every if not programs else most if dynamic(rows) else min(most, every)
