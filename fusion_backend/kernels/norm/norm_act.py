"""Layer or RMS normalisation of rows, then an activation, and its gradients.

forward: u = (x - mean) · rstd, or x · rstd where the norm is not centred; y = act(u · weight +
bias). backward: with z = u · weight + bias and e = dy · act'(z), dweight and dbias are the sums
over rows of e · u and e; with g = e · weight, dx = rstd (g - u mean(g u) - mean(g)), without
mean(g) where the norm is not centred. z is computed again, not kept. All sums are in fp32; partial
sums of each program are added up by a second kernel, in order: the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.activations import tanh
from fusion_backend.kernels.common.inputs import as_rows, number
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.common.rows import Config, grid
from fusion_backend.kernels.common.vectors import row_vector
from fusion_backend.kernels.gemm.epilogue import bell_of, epilogue, slope
from fusion_backend.kernels.norm import backward_short
from fusion_backend.kernels.norm.backward_short import write_gradient
from fusion_backend.kernels.norm.operands import Norm
from fusion_backend.kernels.norm.weight_sums import add_up, partial_sums, write_sums

MAX_HELD = 8192  # elements of the longest row


def forward_config(n: int) -> Config:
    """16 or 32 elements a thread (swept on an H200)."""
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, 2048 // block)
    return Config(block, rows, 2 if 64 < block <= 512 else max(4, rows * block // 1024))


def backward_config(n: int) -> Config:
    """As of a norm alone; weight and bias of short rows stay in registers (swept on an H200)."""
    config = backward_short.backward_config(n)
    return config._replace(early=config.block <= 256)


def forward(
    x: Tensor, norm: Norm, act: str, save: bool, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[..., n]`, contiguous and of x's dtype, and mean and rstd `[rows]` in fp32: empty unless
    saved, mean also if not centred.

    x is `[..., n]` in fp32, bf16 or fp16, n up to MAX_HELD; its columns are one element apart, or
    it is copied. norm has neither offset nor dropout; act is one that epilogue.py has the slope of.
    Grid: rows / config.rows, or config.programs a multiprocessor.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = number(x.shape[-1])
    config = config or forward_config(n)
    x, rows, stride = as_rows(x)
    mean, rstd = (
        torch.empty(rows if keep else 0, dtype=torch.float32, device=x.device)
        for keep in (save and norm.centred, save)
    )
    launch(
        norm_act_kernel, (grid(rows, config.rows, config.programs, x.device),),
        x, norm.weight, norm.bias, y, mean if save and norm.centred else None,
        rstd if save else None, rows, norm.eps,
        STRIDE=stride, N=n, CENTRED=norm.centred, ACT=act,
        INTERPRETED=interpreted(norm_act_kernel), BLOCK=config.block, ROWS=config.rows,
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return y, mean, rstd


# Bytes: x once, y once, 4 or 8 a row where saved.
@triton.jit
def norm_act_kernel(
    X, W, B, Y, MEAN, RSTD, rows, eps,
    STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr, ACT: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = Y.dtype.element_ty
    top, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(rows - top, step), num_stages=STAGES):
        row = (top + i * step + tl.arange(0, ROWS))[:, None].to(tl.int64)
        there = row < rows
        u = tl.load(X + row * STRIDE + col, there & inside, 0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(u, 1, keep_dims=True) / N
            u = tl.where(inside, u - mean, 0.0)
            if MEAN is not None:
                tl.store(MEAN + row, mean, there)
        rstd = tl.rsqrt(tl.sum(u * u, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
        z = affine(u * rstd, W, B, N, BLOCK)
        tl.store(Y + row * N + col, activation_of(z, ACT, KIND, INTERPRETED), there & inside)
        if RSTD is not None:
            tl.store(RSTD + row, rstd, there)


@triton.jit
def affine(u, W, B, N: tl.constexpr, BLOCK: tl.constexpr):
    """u · weight + bias, of whole rows."""
    col = tl.arange(0, BLOCK)
    if W is not None:
        u *= row_vector(W, col, N).to(tl.float32)
    if B is not None:
        u += row_vector(B, col, N).to(tl.float32)
    return u


@triton.jit
def weight_and_bias(W, B, N: tl.constexpr, BLOCK: tl.constexpr):
    """In fp32, as rows; 1 and 0 if missing."""
    w, b = 1.0, 0.0
    if W is not None:
        w = row_vector(W, tl.arange(0, BLOCK), N).to(tl.float32)
    if B is not None:
        b = row_vector(B, tl.arange(0, BLOCK), N).to(tl.float32)
    return w, b


@triton.jit
def activation_of(z, ACT: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """act(z) for a result in KIND, z in fp32; in fp32 gelu's tanh form is as precise as eager's."""
    if KIND == tl.float32 and ACT == "gelu_tanh":
        y = 0.5 * z * (1.0 + tanh(gelu_argument(z)))
    else:
        y = epilogue(z, ACT, KIND, INTERPRETED)
    return y


@triton.jit
def slope_of(z, ACT: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """act'(z) for a gradient in KIND, z in fp32; in fp32 both forms of gelu are as precise as
    eager's.
    """
    if KIND == tl.float32 and ACT == "gelu":
        y = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476) + 0.3989422804014327 * z * bell_of(z)
    elif KIND == tl.float32 and ACT == "gelu_tanh":
        t = tanh(gelu_argument(z))
        y = 0.5 + 0.5 * t
        y += z * (1.0 - t * t) * (0.3989422804014327 + 0.05351611220445 * z * z)
    else:
        y = slope(z, ACT, KIND, INTERPRETED)
    return y


@triton.jit
def gelu_argument(z):
    """sqrt(2 / π) (z + 0.044715 z³)"""
    return 0.7978845608028654 * (z + 0.044715 * z * z * z)


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, norm: Norm, act: str,
    needs: tuple[bool, bool, bool], config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x `[..., n]`, contiguous, and of weight and bias `[n]`, in x's dtype; None where
    `needs` says no.

    dy and x are `[..., n]`, mean (unread where the norm is not centred) and rstd `[rows]` in fp32.
    Grid: config.programs a multiprocessor.
    """
    n = number(x.shape[-1])
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    if not any(needs):
        return None, None, None
    config = config or backward_config(n)
    dtype, (dy, _, dy_stride), (x, rows, x_stride) = x.dtype, as_rows(dy), as_rows(x)
    programs = grid(rows, config.rows, config.programs, x.device)
    sums = partial_sums(x, needs, programs)
    launch(
        norm_act_backward_kernel, (programs,),
        dy, x, norm.weight, norm.bias, mean if norm.centred else None, rstd, dx, sums, rows,
        DY_STRIDE=dy_stride, X_STRIDE=x_stride, N=n, WEIGHT=needs[1], BIAS=needs[2], ACT=act,
        INTERPRETED=interpreted(norm_act_backward_kernel), BLOCK=config.block, ROWS=config.rows,
        STAGES=config.stages, EARLY=config.early, num_warps=config.warps,
    )  # fmt: skip
    return dx, *add_up(sums, dtype, *needs[1:])


# Bytes: dy and x once, dx once, 8 a program and column.
@triton.jit
def norm_act_backward_kernel(
    DY, X, W, B, MEAN, RSTD, DX, SUMS, rows,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = X.dtype.element_ty
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
        g = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        u = tl.load(X + row * X_STRIDE + col, keep, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, there, 0.0)
        if MEAN is not None:
            u -= tl.load(MEAN + row, there, 0.0)
        u *= rstd
        if not EARLY:
            w, b = weight_and_bias(W, B, N, BLOCK)
        g *= slope_of(u * w + b, ACT, KIND, INTERPRETED)
        if WEIGHT:
            dw += g * u
        if BIAS:
            db += g
        if DX is not None:
            write_gradient(
                g * w, u, rstd, row, keep, MEAN, None, DX, None, 0,
                0, N, BLOCK, THRESHOLD=0, SCALE=1.0,
            )  # fmt: skip
    if SUMS is not None:
        write_sums(
            SUMS, tl.sum(dw, 0, keep_dims=True), tl.sum(db, 0, keep_dims=True),
            tl.program_id(0), tl.num_programs(0), col, inside, N, WEIGHT, BIAS,
        )  # fmt: skip
