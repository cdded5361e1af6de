"""The exponential of a scaled sum: exp((x + y) · s), elementwise.

x and y have one shape and one dense layout, s is a number. fp32, bf16 or fp16, computed in fp32 and
rounded once.
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
from fusion_backend.kernels.common.activations import exp
from fusion_backend.kernels.common.rows import RESULTS


@Pattern(reciprocal=True, inductor="pointwise")
def add_mul_exp(x: Tensor, y: Tensor, s: float) -> Tensor:
    return torch.exp((x + y) * s)


@add_mul_exp.near_miss
def _(x, y, s):
    """one of the two is scaled"""
    return torch.exp(x + y * s)


@add_mul_exp.near_miss
def _(x, y, s):
    """a power of two"""
    return torch.exp2((x + y) * s)


@add_mul_exp.guard
def _(x, y, s):
    return reject_dtypes(x=x, y=y) or reject_layouts(x=x, y=y) or reject_dynamic(s=s)


@add_mul_exp.worthwhile
def _(x, y, s, training):
    return Reject(f"Inductor's kernel is as fast ({RESULTS})")


@add_mul_exp.kernel
def _(x, y, s):
    out = torch.empty_like(x)
    grid, last = blocks_of(out.numel(), 2048)
    launch(
        add_mul_exp_kernel,
        grid,
        in_layout(out, x),
        in_layout(out, y),
        out,
        last,
        s,
        BLOCK=2048,
        num_warps=4,
    )
    return out


@add_mul_exp.backward(plain=True, result=True)
def _(saved, grad):
    """From the result alone: neither x nor y is kept."""
    d = (grad.float() * saved.result.float() * saved.s).to(grad.dtype)
    return d.sum_to_size(saved.x.shape), d.sum_to_size(saved.y.shape)


# Bytes: 3 times the tensor (x, y, out).
@triton.jit
def add_mul_exp_kernel(X, Y, OUT, last, s, BLOCK: tl.constexpr):
    first, left = block_of(last, BLOCK)
    i, keep = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < left
    x = tl.load(X + i, keep).to(tl.float32)
    y = tl.load(Y + i, keep).to(tl.float32)
    tl.store(OUT + i, exp((x + y) * tl.cast(s, tl.float32)), keep)


@add_mul_exp.inputs(dict(size=1003), dict(size=100_000_000))
def _(tensor, size):
    return tensor(size), tensor(size), 0.5
