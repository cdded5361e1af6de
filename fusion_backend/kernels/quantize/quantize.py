"""Symmetric int8 of rows, each with a scale of its own, with or without an RMS normalisation before
it.

y = x, or x / sqrt(mean(x²) + norm_eps) · (weight + offset); scale = max(abs(y)) / 127, not below
eps; q = clamp(round(y / scale), -128, 127) of the scale as it is returned, in the dtype of x. Or q
of y · (1 / scale), or of y · scale where scale = 127 / max(abs(y)). Computed in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import as_rows, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import row_config, tuned


def config(n: int, itemsize: int, norm: bool) -> tuple[int, int, int]:
    """BLOCK, rows a program and warps: 64 elements a thread (swept on an H200), 32 with a norm."""
    block, rows_each, warps = row_config(n, itemsize)
    each = 1024 if norm else 2048
    return (
        (block, rows_each, warps)
        if block < n
        else (block, max(1, 1024 // block), max(1, block // each))
    )


def forward(
    x: Tensor, weight: Tensor | None, offset: float | None, norm_eps: float | None,
    eps: float | None, how: tuple[int, int, int] | None = None, scale_is_read: bool = True,
    by: str = "scale", bound: str = "scale", wide: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q `[..., n]` int8 and scale `[..., 1]` in x's dtype, or in fp32 if wide, both contiguous. The
    scale is empty and not written where nobody reads it.

    x is `[..., n]` in fp32, bf16 or fp16, its columns one element apart (else it is copied); weight
    `[n]` of x's dtype, contiguous, or None. norm_eps None: no norm. eps: the lower bound of the
    scale, or with bound "largest" of max(abs(y)); None: no bound. by: "scale", q of y / scale;
    "reciprocal", q of y · (1 / scale); "inverse", q of y · scale, where scale = 127 / max(abs(y)).
    Grid: rows / rows_each.
    """
    n, norm = number(x.shape[-1]), norm_eps is not None
    kernel = "rms_norm_quantize" if norm else "quantize_per_token"
    rule = config(n, x.element_size(), norm)
    block, rows_each, warps, *_ = how or tuned(kernel, x.numel() // n, n, x.element_size(), rule)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale_shape = (*x.shape[:-1], 1) if scale_is_read else (0,)
    scale = torch.empty(scale_shape, dtype=torch.float32 if wide else x.dtype, device=x.device)
    x, rows, stride = as_rows(x)
    kernel, rest = (
        (quantize_rows_kernel, dict(ROWS=rows_each))
        if block >= n
        else (quantize_long_rows_kernel, {})
    )
    # Torch divides by a number exactly on CPU and multiplies with its fp32 reciprocal on CUDA: so
    # does the kernel.
    launch(
        kernel, ((rows + rows_each - 1) // rows_each,), x, weight, q,
        scale if scale_is_read else None, rows, offset or 0.0, norm_eps or 0.0, eps or 0.0,
        STRIDE=stride, N=n, NORM=norm, BY=by, BOUND=bound, WIDE=wide,
        DIVIDE=x.device.type == "cpu", BLOCK=block, num_warps=warps, **rest,
    )  # fmt: skip
    return q, scale


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_and_top(total, top, more, other):
    return total + more, larger_or_nan(top, other)


@triton.jit
def scale_of(top, eps, BY: tl.constexpr, BOUND: tl.constexpr, DIVIDE: tl.constexpr):
    """The scale of rows whose largest value is top; NaN of NaN."""
    least = tl.cast(eps, tl.float32)
    if BOUND == "largest":
        top = larger_or_nan(top, least)
    if BY == "inverse":  # torch divides a number by a tensor in two steps
        scale = tl.div_rn(1.0, top) * 127.0
    elif DIVIDE:
        scale = tl.div_rn(top, 127.0)
    else:
        scale = top * 0.007874015718698502  # 1 / 127 in fp32
    return larger_or_nan(scale, least) if BOUND == "scale" else scale


@triton.jit
def rounded(q):
    """The nearest int8, half to even, of |q| < 2**22: this sum leaves no bits for a fraction, and
    ends in q's bits.
    """
    return (q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quotient(x, scale):
    """To the last bit, as torch has it, from one division a row: an estimate and its error, put
    back.
    """
    inverse = tl.div_rn(1.0, scale)
    q = x * inverse
    return tl.fma(tl.fma(-q, scale, x), inverse, q)


@triton.jit
def in_units(x, scale, BY: tl.constexpr):
    """x in units of a scale that is a normal number."""
    if BY == "scale":
        return quotient(x, scale)
    elif BY == "reciprocal":
        return x * tl.div_rn(1.0, scale)
    else:
        return x * scale


@triton.jit
def quantized(x, scale, BY: tl.constexpr):
    """Whatever the scale. NaN, as of 0 / 0, is 0."""
    if BY == "scale":
        # 2**100: the inverse within a quotient must not overflow
        boost = tl.where(scale < 1e-30, 1.2676506002282294e30, 1.0)
        q = in_units(x * boost, scale * boost, BY)
    else:
        q = in_units(x, scale, BY)
    return rounded(tl.where(q == q, tl.minimum(tl.maximum(q, -128.0), 127.0), 0.0))


@triton.jit
def weighted(x, W, rstd, col, offset, N: tl.constexpr):
    y = x if rstd is None else x * rstd
    if W is not None:
        y *= tl.load(W + col, col < N, 0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    return y


# Bytes: x once, one byte an element, a scale a row.
@triton.jit
def quantize_rows_kernel(
    X, W, Q, SCALE, rows, offset, norm_eps, eps,
    STRIDE: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, BY: tl.constexpr,
    BOUND: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
    # y = x (weight + offset) rstd: its largest is the largest of the product, times rstd, to the
    # last bit
    if NORM:
        squares = x * x
        x = weighted(x, W, None, col, offset, N)
        total, top = tl.reduce((squares, tl.abs(x)), 1, sum_and_top, keep_dims=True)
        rstd = tl.rsqrt(total / N + tl.cast(norm_eps, tl.float32))
        top *= rstd
    else:
        top = tl.reduce(tl.abs(x), 1, larger_or_nan, keep_dims=True)
    kept: tl.constexpr = tl.float32 if WIDE else X.dtype.element_ty
    scale = scale_of(top, eps, BY, BOUND, DIVIDE).to(kept)
    if SCALE is not None:
        tl.store(SCALE + row, scale, row < rows)
    scale = scale.to(tl.float32)
    # Of a scale that is a normal number q is one, and not below -128: half the instructions, which
    # are the limit.
    least: tl.constexpr = 6.103515625e-05 if kept == tl.float16 else 1e-30
    normal = (scale >= least) & (scale < float("inf"))
    if NORM:
        factor = rstd * (scale if BY == "inverse" else tl.div_rn(1.0, scale))
        normal = normal & (factor < float("inf"))
    if tl.min(normal.to(tl.int32)) == 1:
        q = x * factor if NORM else in_units(x, scale, BY)
        tl.store(Q + row * N + col, rounded(tl.minimum(q, 127.0)), keep)
    else:
        tl.store(Q + row * N + col, quantized(x * rstd if NORM else x, scale, BY), keep)


# Bytes: as above; the later readings of a row come from L2.
@triton.jit
def quantize_long_rows_kernel(
    X, W, Q, SCALE, rows, offset, norm_eps, eps,
    STRIDE: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, BY: tl.constexpr,
    BOUND: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    rstd = 1.0
    if NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, N, BLOCK):
            x = tl.load(X + row * STRIDE + start + lane, start + lane < N, 0.0).to(tl.float32)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares) / N + tl.cast(norm_eps, tl.float32))
    tops = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        x = tl.load(X + row * STRIDE + start + lane, start + lane < N, 0.0).to(tl.float32)
        if NORM:
            x = weighted(x, W, rstd, start + lane, offset, N)
        tops = larger_or_nan(tops, tl.abs(x))
    kept: tl.constexpr = tl.float32 if WIDE else X.dtype.element_ty
    scale = scale_of(tl.reduce(tops, 0, larger_or_nan), eps, BY, BOUND, DIVIDE).to(kept)
    if SCALE is not None:
        tl.store(SCALE + row, scale)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        if NORM:
            x = weighted(x, W, rstd, start + lane, offset, N)
        tl.store(Q + row * N + start + lane, quantized(x, scale.to(tl.float32), BY), keep)
