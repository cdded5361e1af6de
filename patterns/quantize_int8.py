"""Quantise to int8 with one scale: clamp(round(x / scale + zero_point), -128, 127), rounding half
to even.

x is dense, in fp32, bf16 or fp16, computed in fp32; scale and zero_point are numbers, zero_point
may be missing. The integers are those of eager fp32 on the same device; NaN becomes 0. Not
differentiable.
"""

from __future__ import annotations

import ctypes
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import (
    block_of,
    blocks_of,
    in_layout,
    launch,
    reject_dtypes,
    reject_dynamic,
    reject_layouts,
)
from fusion_backend.kernels.common.rows import RESULTS
from fusion_backend.kernels.quantize.quantize import rounded


@Pattern(inductor="pointwise")
def quantize_int8(x: Tensor, scale: float, zero_point: float | None) -> Tensor:
    q = x / scale if zero_point is None else x / scale + zero_point
    return torch.clamp(torch.round(q), -128, 127).to(torch.int8)


@quantize_int8.spelling
def _(x, scale, zero_point):
    q = x / scale if zero_point is None else x / scale + zero_point
    return torch.round(torch.clamp(q, -128, 127)).to(torch.int8)


@quantize_int8.near_miss
def _(x, scale, zero_point):
    """rounded towards zero"""
    q = x / scale if zero_point is None else x / scale + zero_point
    return torch.clamp(q, -128, 127).to(torch.int8)


@quantize_int8.near_miss
def _(x, scale, zero_point):
    """without -128"""
    q = x / scale if zero_point is None else x / scale + zero_point
    return torch.clamp(torch.round(q), -127, 127).to(torch.int8)


@quantize_int8.guard
def _(x, scale, zero_point):
    return (
        reject_dtypes(x=x)
        or reject_layouts(x=x)
        or reject_dynamic(scale=scale, zero_point=zero_point)
    )


@quantize_int8.worthwhile
def _(x, scale, zero_point, training):
    if x.dtype != torch.bfloat16 or not statically_known_true(x.numel() >= 64_000_000):
        return Reject(f"timed faster than Inductor's for bf16 and 64 M elements alone ({RESULTS})")


@quantize_int8.kernel
def _(x, scale, zero_point):
    return forward(x, scale, zero_point)


def config(itemsize: int) -> tuple[int, int]:
    """BLOCK and warps: 16 bytes of the result a thread, or 32 of x (swept on an H200)."""
    return (4096, 8) if itemsize == 2 else (2048, 8)


def forward(x, scale, zero_point, how=None):
    block, warps = how or config(x.element_size())
    out = torch.empty_like(x, dtype=torch.int8)
    grid, last = blocks_of(out.numel(), block)
    # Torch divides by a number exactly on CPU, and on CUDA multiplies with the reciprocal, rounded
    # once to fp32. The kernel does what eager does on the same device, so that every integer
    # agrees.
    divide = x.device.type == "cpu"
    launch(
        quantize_int8_kernel, grid, in_layout(out, x), out, last,
        scale if divide else reciprocal(scale), zero_point or 0.0, DIVIDE=divide, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out


def reciprocal(scale: float) -> float:
    """Of the fp64 number, in fp32: of 1e-3 it is 1000, of the nearest fp32 number it
    would not be.
    """
    return ctypes.c_float(1.0 / scale).value if scale else math.copysign(math.inf, scale)


# Bytes: x once, one byte an element out.
@triton.jit
def quantize_int8_kernel(
    X, OUT, last, scale, zero_point, DIVIDE: tl.constexpr, BLOCK: tl.constexpr
):
    first, left = block_of(last, BLOCK)
    i, keep = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < left
    x = tl.load(X + i, keep).to(tl.float32)
    scale = tl.cast(scale, tl.float32)  # Inductor passes Python floats as fp64
    if DIVIDE:
        q = tl.div_rn(x, scale)
    else:
        q = tl.fma(x, scale, 0.0)  # the compiler would join a product and the sum
    q += tl.cast(zero_point, tl.float32)
    tl.store(
        OUT + i, rounded(tl.where(q == q, tl.minimum(tl.maximum(q, -128.0), 127.0), 0.0)), keep
    )


@quantize_int8.inputs(dict(size=1003), dict(size=50_000_000))
def _(tensor, size):
    return tensor(size), 0.02, 3.0
