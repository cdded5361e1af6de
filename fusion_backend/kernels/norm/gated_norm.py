"""Layer or RMS normalisation of rows with a gate, behind the norm or in front of it, and its
gradients.

With g = act(gate), the gate behind the norm: u = (x - mean) · rstd, or x · rstd where the norm is
not centred; y = (u · weight + bias) · g. backward: with e = dy · g, dweight and dbias are the sums
over rows of e · u and e; dgate = dy · (u · weight + bias) · act'(gate); with h = e · weight, dx =
rstd (h - u mean(h u) - mean(h)), without mean(h) where the norm is not centred.

In front of it: u is that of x · g, y = u · weight + bias, and with e = dy and d what dx is above,
dx = d · g and dgate = d · x · act'(gate).

All sums are in fp32; partial sums of each program are added up by a second kernel, in order: the
same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.inputs import as_rows, common_dtype, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, grid
from fusion_backend.kernels.norm.backward_short import gradient_of_rows
from fusion_backend.kernels.norm.norm_act import affine, weight_and_bias
from fusion_backend.kernels.norm.operands import Norm
from fusion_backend.kernels.norm.weight_sums import add_up, partial_sums, write_sums

# Elements of the longest row; with the gate in front of a layer norm half of them, because the
# backward would exceed its registers.
MAX_HELD = 8192


def forward_config(n: int) -> Config:
    """8 or 16 elements a thread of each of the two operands (short rows swept on an H200)."""
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, (2048 if block <= 512 else 1024) // block)
    return Config(block, rows, max(4, rows * block // 512))


def backward_config(n: int, itemsize: int) -> Config:
    """8 elements a thread of each of the three operands, 16 of rows longer than 4096, and the rows
    ahead that were the fastest on an H200 or that shared memory holds.
    """
    block, stages = max(16, triton.next_power_of_2(n)), 3 if itemsize == 2 else 2
    if block <= 2048:
        return Config(block, 2048 // block, 8, 2, stages, early=True)
    if block <= 4096:
        return Config(block, 1, 16, 1, 4 if itemsize == 2 else 2, early=True)
    return Config(block, 1, 16, 1, stages)  # with the weight in registers it spills


def forward(
    x: Tensor, gate: Tensor, norm: Norm, act: str, gate_first: bool, save: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y `[..., n]`, contiguous, in dtype or that of x, and mean and rstd `[rows]` in fp32: empty
    unless saved, mean also if not centred.

    x and gate are `[..., n]` in fp32, bf16 or fp16; their columns are one element apart, or they
    are copied. norm has neither offset nor dropout; act is silu or sigmoid. Grid:
    rows / config.rows.
    """
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    n = number(x.shape[-1])
    config = forward_config(n)
    (x, rows, x_stride), (gate, _, gate_stride) = as_rows(x), as_rows(gate)
    mean, rstd = (
        torch.empty(rows if keep else 0, dtype=torch.float32, device=x.device)
        for keep in (save and norm.centred, save)
    )
    launch(
        gated_norm_kernel, (grid(rows, config.rows, config.programs, x.device),),
        x, gate, norm.weight, norm.bias, y, mean if save and norm.centred else None,
        rstd if save else None, rows, norm.eps,
        X_STRIDE=x_stride, GATE_STRIDE=gate_stride, N=n, CENTRED=norm.centred, ACT=act,
        GATE_FIRST=gate_first, BLOCK=config.block, ROWS=config.rows, num_warps=config.warps,
    )  # fmt: skip
    return y, mean, rstd


# Bytes: x and gate once, y once, 4 or 8 a row where saved.
@triton.jit
def gated_norm_kernel(
    X, GATE, W, B, Y, MEAN, RSTD, rows, eps,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    ACT: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    there = row < rows
    u = tl.load(X + row * X_STRIDE + col, there & inside, 0.0).to(tl.float32)
    gate = tl.load(GATE + row * GATE_STRIDE + col, there & inside, 0.0).to(tl.float32)
    g = activated(gate, ACT)
    if GATE_FIRST:
        u = rounded_product(u, g)
    if CENTRED:
        mean = tl.sum(u, 1, keep_dims=True) / N
        u = tl.where(inside, u - mean, 0.0)
        if MEAN is not None:
            tl.store(MEAN + row, mean, there)
    rstd = tl.rsqrt(tl.sum(u * u, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
    if RSTD is not None:
        tl.store(RSTD + row, rstd, there)
    y = affine(u * rstd, W, B, N, BLOCK)
    if not GATE_FIRST:
        y *= g
    tl.store(Y + row * N + col, y, there & inside)


def backward(
    dy: Tensor, x: Tensor, gate: Tensor, mean: Tensor, rstd: Tensor, norm: Norm, act: str,
    gate_first: bool, needs: tuple[bool, bool, bool, bool], config: Config | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x and gate `[..., n]`, contiguous and in their dtypes, and of weight and bias
    `[n]`, in theirs; None where `needs` says no.

    dy, x and gate are `[..., n]`, mean (unread where the norm is not centred) and rstd `[rows]` in
    fp32. Grid: config.programs a multiprocessor.
    """
    if not any(needs):
        return None, None, None, None
    n = number(x.shape[-1])
    dx, dgate = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
        for t, need in zip((x, gate), needs, strict=False)
    )
    config = config or backward_config(n, max(t.element_size() for t in (dy, x, gate)))
    of_vectors = common_dtype(x, norm.weight, norm.bias)
    (dy, _, dy_stride), (x, rows, x_stride) = as_rows(dy), as_rows(x)
    gate, _, gate_stride = as_rows(gate)
    programs = grid(rows, config.rows, config.programs, x.device)
    sums = partial_sums(x, (needs[0], *needs[2:]), programs)
    launch(
        gated_norm_backward_kernel, (programs,),
        dy, x, gate, norm.weight, norm.bias, mean if norm.centred else None, rstd, dx, dgate, sums,
        rows, DY_STRIDE=dy_stride, X_STRIDE=x_stride, GATE_STRIDE=gate_stride, N=n,
        WEIGHT=needs[2], BIAS=needs[3], ACT=act, GATE_FIRST=gate_first,
        BLOCK=config.block, ROWS=config.rows, STAGES=config.stages, EARLY=config.early,
        num_warps=config.warps,
    )  # fmt: skip
    return dx, dgate, *add_up(sums, of_vectors, *needs[2:])


# Bytes: dy, x and gate once, dx and dgate once, 8 a program and column.
@triton.jit
def gated_norm_backward_kernel(
    DY, X, GATE, W, B, MEAN, RSTD, DX, DGATE, SUMS, rows,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if EARLY:
        w, b = weight_and_bias(W, B, N, BLOCK)
    for top in tl.range(
        tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES
    ):
        row = (top + tl.arange(0, ROWS))[:, None].to(tl.int64)
        there = row < rows
        keep = there & inside
        e = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        x = tl.load(X + row * X_STRIDE + col, keep, 0.0).to(tl.float32)
        gate = tl.load(GATE + row * GATE_STRIDE + col, keep, 0.0).to(tl.float32)
        g, slope = gate_and_slope(gate, ACT)
        if not EARLY:
            w, b = weight_and_bias(W, B, N, BLOCK)
        rstd = tl.load(RSTD + row, there, 0.0)
        u = rounded_product(x, g) if GATE_FIRST else x
        if MEAN is not None:
            u = tl.where(inside, u - tl.load(MEAN + row, there, 0.0), 0.0)
        u *= rstd
        if not GATE_FIRST:
            if DGATE is not None:
                tl.store(DGATE + row * N + col, e * (u * w + b) * slope, keep)
            e *= g
        if WEIGHT:
            dw += e * u
        if BIAS:
            db += e
        d = gradient_of_rows(e * w, u, rstd, MEAN, N)
        if GATE_FIRST:
            if DGATE is not None:
                tl.store(DGATE + row * N + col, d * x * slope, keep)
            d *= g
        if DX is not None:
            tl.store(DX + row * N + col, d, keep)
    if SUMS is not None:
        write_sums(
            SUMS, tl.sum(dw, 0, keep_dims=True), tl.sum(db, 0, keep_dims=True),
            tl.program_id(0), tl.num_programs(0), col, inside, N, WEIGHT, BIAS,
        )  # fmt: skip


@triton.jit
def rounded_product(x, g):
    """x · g, which the compiler does not join with the subtraction of a mean: its rounding error
    would be all that is left of a row of equal numbers.
    """
    return tl.fma(x, g, tl.zeros_like(x))


@triton.jit
def gate_and_slope(gate, ACT: tl.constexpr):
    """act(gate) and act'(gate), of fp32."""
    s = activated(gate, "sigmoid")
    if ACT == "silu":
        g = gate * s
        slope = s * (1.0 + gate * (1.0 - s))
    else:
        tl.static_assert(ACT == "sigmoid")
        g = s
        slope = s * (1.0 - s)
    return g, slope
