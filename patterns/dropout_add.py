"""Dropout, then a residual sum: dropout(x, p) + residual, elementwise. In training only.

x and residual are `[..., n]` of one shape in fp32, bf16 or fp16, their rows up to 131072 long;
computed in fp32 and rounded once. The mask is a function of a seed that is drawn anew at each call
(torch.manual_seed repeats it) and of the position: nothing but the seed is kept for the backward.
It is not the mask that eager or plain Inductor draws; with Inductor's fallback_random, which asks
for eager's, nothing is fused. Source: Srivastava et al. 2014, torch.nn.functional.dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern
from fusion_backend.kernels import (
    as_rows,
    block_of,
    blocks_of,
    dropout_factors,
    dropout_scale,
    dropout_threshold,
    dropped,
    launch,
    maybe_rows,
    number,
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_shapes,
)
from fusion_backend.kernels.common.rows import UNMEASURED


@Pattern(inductor="reduction")
def dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True) + residual


@dropout_add.seeded
def _(x, residual, p, seed):
    return dropped(x.reshape(-1), seed, p).reshape(x.shape) + residual


@dropout_add.near_miss
def _(x, residual, p):
    """dropout of the sum"""
    return F.dropout(x + residual, p, True)


@dropout_add.guard
def _(x, residual, p):
    return (
        reject_rows(x)
        or reject_shapes(x=x, residual=residual)
        or reject_dtypes(x=x, residual=residual)
        or reject_dynamic(p=p)
    )


@dropout_add.worthwhile
def _(x, residual, p, training):
    if statically_known_true(x.numel() < 3 << 20):
        return UNMEASURED


@dropout_add.kernel
def _(x, residual, p, seed):
    return run(x, residual, p, seed)


@dropout_add.backward(same={"residual": 0})
def _(saved, dy):
    return run(dy, None, saved.p, saved.seed) if saved.needs["x"] else None, None


def run(x, residual, p, seed, block=2048, warps=4):
    """Dropout of x, plus the residual where there is one. Grid: elements / block."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n, (grid, last) = number(x.shape[-1]), blocks_of(out.numel(), block)
    (x, _, stride), (residual, _, residual_stride) = as_rows(x), maybe_rows(residual)
    launch(
        dropout_add_kernel, grid, x, residual, seed, out, last,
        N=n, STRIDE=stride, RESIDUAL_STRIDE=residual_stride,
        THRESHOLD=dropout_threshold(p), SCALE=dropout_scale(p), BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


# Bytes: x, residual and out once.
@triton.jit
def dropout_add_kernel(
    X, R, SEED, OUT, last, N: tl.constexpr, STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, left = block_of(last, BLOCK)
    i, keep = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < left
    x = tl.load(X + row_offset(i, N, STRIDE), keep, 0.0).to(tl.float32)
    if R is not None:
        r = tl.load(R + row_offset(i, N, RESIDUAL_STRIDE), keep, 0.0).to(tl.float32)
    # x and the residual are asked for before the generator runs; ptxas would wait
    tl.debug_barrier()
    x *= dropout_factors(tl.load(SEED), first // 4 + tl.arange(0, BLOCK // 4), THRESHOLD, SCALE)
    if R is not None:
        x += r
    tl.store(OUT + i, x, keep)


@triton.jit
def row_offset(i, N: tl.constexpr, STRIDE: tl.constexpr):
    """Where element i of rows of N lies in memory."""
    return i if N == STRIDE else i // N * STRIDE + i % N


@dropout_add.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), 0.1
