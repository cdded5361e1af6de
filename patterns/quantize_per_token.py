"""Quantise to int8, symmetric, a scale for each row: scale = max(abs(x)) / 127, q = clamp(round(x / scale), -128, 127).

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long. The scale is not below eps, where that is given.
Returns q and scale `[..., 1]`. Computed in fp32; q is that of the scale as returned, in the dtype of x. A row with NaN
has NaN for its scale and 0 for q. Not differentiable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern
from fusion_backend.kernels import launch
from fusion_backend.kernels.inputs import as_rows, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.rows import UNMEASURED, reject_rows, row_config


@Pattern(inductor="reduction")
def quantize_per_token(x: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


@quantize_per_token.spelling
def _(x, eps):
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps):
    """one scale for everything"""
    scale = x.abs().amax() / 127
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


@quantize_per_token.near_miss
def _(x, eps):
    """rounded towards zero"""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(x / scale, -128, 127).to(torch.int8), scale


@quantize_per_token.guard
def _(x, eps):
    return reject_dtypes(x=x) or reject_rows(x) or reject_dynamic(eps=eps)


@quantize_per_token.worthwhile
def _(x, eps, training):
    if not 2048 <= number(x.shape[-1]) <= 8192 or statically_known_true(x.numel() < 1 << 22):
        return UNMEASURED


@quantize_per_token.kernel
def _(x, eps):
    return forward(x, eps, *config(number(x.shape[-1]), x.element_size()))


def config(n: int, itemsize: int) -> tuple[int, int, int]:
    """BLOCK, rows a program and warps: 64 elements a thread (swept on an H200)."""
    block, rows_each, warps = row_config(n, itemsize)
    return (block, rows_each, warps) if block < n else (block, max(1, 1024 // block), max(1, block // 2048))


def forward(x, eps, block, rows_each, warps):
    """Grid: rows / rows_each."""
    n = number(x.shape[-1])
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=x.dtype, device=x.device)
    x, rows, stride = as_rows(x)
    kernel, rest = (quantize_rows_kernel, dict(ROWS=rows_each)) if block >= n else (quantize_long_rows_kernel, {})
    # Torch divides by a number exactly on CPU and multiplies with its fp32 reciprocal on CUDA: so does the kernel.
    launch(
        kernel, ((rows + rows_each - 1) // rows_each,), x, q, scale, rows, 0.0 if eps is None else eps, STRIDE=stride,
        N=n, DIVIDE=x.device.type == "cpu", BLOCK=block, num_warps=warps, **rest,
    )  # fmt: skip
    return q, scale


@triton.jit
def scale_of(top, broken, eps, DIVIDE: tl.constexpr):
    """The scale of rows whose largest value is top; NaN for broken rows."""
    if DIVIDE:
        scale = tl.div_rn(top, 127.0)
    else:
        scale = top * 0.007874015718698502  # 1 / 127 in fp32
    return tl.where(broken > 0, float("nan"), tl.maximum(scale, tl.cast(eps, tl.float32)))


@triton.jit
def quantized(x, scale):
    # The quotient to the last bit, as torch has it, from one division a row: an estimate and its error, put back.
    boost = tl.where(scale < 1e-30, 1.2676506002282294e30, 1.0)  # 2**100: an inverse must not overflow
    x, scale = x * boost, scale * boost
    inverse = tl.div_rn(1.0, scale)
    q = x * inverse
    q = tl.fma(tl.fma(-q, scale, x), inverse, q)
    q = tl.where(q == q, tl.minimum(tl.maximum(q, -128.0), 127.0), 0.0)
    # Below 2**22 this sum leaves no bits for a fraction: it rounds half to even, as the hardware adds.
    return ((q + 12582912.0) - 12582912.0).to(tl.int8)


# Bytes: x once, one byte an element, a scale a row.
@triton.jit
def quantize_rows_kernel(
    X, Q, SCALE, rows, eps, STRIDE: tl.constexpr, N: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 1, keep_dims=True)
    scale = scale_of(tl.max(tl.abs(x), 1, keep_dims=True), broken, eps, DIVIDE).to(SCALE.dtype.element_ty)
    tl.store(SCALE + row, scale, row < rows)
    tl.store(Q + row * N + col, quantized(x, scale.to(tl.float32)), keep)


# Bytes: as above; the second reading of a row comes from L2.
@triton.jit
def quantize_long_rows_kernel(
    X, Q, SCALE, rows, eps, STRIDE: tl.constexpr, N: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    tops = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, N, BLOCK):
        x = tl.load(X + row * STRIDE + start + lane, start + lane < N, 0.0).to(tl.float32)
        tops = tl.maximum(tops, tl.abs(x))
        broken = tl.maximum(broken, (x != x).to(tl.int32))
    scale = scale_of(tl.max(tops), tl.max(broken), eps, DIVIDE).to(SCALE.dtype.element_ty)
    tl.store(SCALE + row, scale)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        tl.store(Q + row * N + start + lane, quantized(x, scale.to(tl.float32)), keep)


@quantize_per_token.inputs(dict(rows=7, n=100), dict(rows=8192, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-5
