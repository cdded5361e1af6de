"""Add, then multiply: (x + y) · z, elementwise.

x, y and z have one shape and one dense layout; z may be a number instead. fp32, bf16 or fp16,
computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


@Pattern(inductor="pointwise")
def add_mul(x: Tensor, y: Tensor, z: Tensor | float) -> Tensor:
    return (x + y) * z


@add_mul.near_miss
def _(x, y, z):
    """multiplied before it is added"""
    return x + y * z


@add_mul.near_miss
def _(x, y, z):
    """a difference"""
    return (x - y) * z


@add_mul.guard
def _(x, y, z):
    return reject_dtypes(x=x, y=y, z=z) or reject_layouts(x=x, y=y, z=z) or reject_dynamic(z=z)


@add_mul.worthwhile
def _(x, y, z, training):
    return Reject(f"Inductor's kernel is as fast ({RESULTS})")


@add_mul.kernel
def _(x, y, z):
    out = torch.empty_like(x)
    grid, last = blocks_of(out.numel(), 2048)
    x, y, z = (in_layout(out, t) if isinstance(t, Tensor) else t for t in (x, y, z))
    launch(
        add_mul_kernel,
        grid,
        x,
        y,
        z,
        out,
        last,
        TENSOR=isinstance(z, Tensor),
        BLOCK=2048,
        num_warps=4,
    )
    return out


# Bytes: 3 or 4 times the tensor (x, y, z where it is a tensor, out).
@triton.jit
def add_mul_kernel(X, Y, Z, OUT, last, TENSOR: tl.constexpr, BLOCK: tl.constexpr):
    first, left = block_of(last, BLOCK)
    i, keep = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < left
    x = tl.load(X + i, keep).to(tl.float32)
    y = tl.load(Y + i, keep).to(tl.float32)
    if TENSOR:
        z = tl.load(Z + i, keep).to(tl.float32)
    else:
        z = tl.cast(Z, tl.float32)  # Inductor passes Python floats as fp64
    tl.store(OUT + i, (x + y) * z, keep)


@add_mul.inputs(dict(size=1003), dict(size=20_000_000))
def _(tensor, size):
    return tensor(size), tensor(size), tensor(size)
