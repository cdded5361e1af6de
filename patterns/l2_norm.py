"""Rows of unit length: x / max(‖x‖, eps), over the last dimension; without eps, x / ‖x‖.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; the sum of squares is taken in
fp32. Backward keeps x alone. Source: torch.nn.functional.normalize.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch
from fusion_backend.kernels.common.inputs import number, reject_dtypes, reject_dynamic, rows_as_in
from fusion_backend.kernels.common.rows import RESULTS, UNMEASURED, reject_rows, row_config, tuned


@Pattern(inductor="reduction")
def l2_norm(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return F.normalize(x, dim=-1, eps=eps)


@l2_norm.near_miss
def _(x, eps):
    """eps added, not a lower bound"""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + (0.1 if eps is None else eps))


@l2_norm.near_miss
def _(x, eps):
    """the norm of another order"""
    return x / torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True).clamp_min(
        0.0 if eps is None else eps
    )


@l2_norm.guard
def _(x, eps):
    return reject_dtypes(x=x) or reject_rows(x) or reject_dynamic(eps=eps)


@l2_norm.worthwhile
def _(x, eps, training):
    if x.element_size() == 4:
        return Reject("in fp32 it is Inductor's: timed at 0.97 of Inductor on an H200")
    if number(x.shape[-1]) > 4096:
        return Reject(f"Inductor is as fast for rows of more than 4096 ({RESULTS})")
    if statically_known_true(x.numel() < 1 << 24):
        return UNMEASURED


@l2_norm.kernel
def _(x, eps):
    return forward(x, eps)


def forward(x, eps, config=None):
    """Grid: rows / rows_each."""
    n, y = number(x.shape[-1]), torch.empty_like(x)
    x, rows, stride = rows_as_in(y, x)
    rule = row_config(n, x.element_size())
    block, rows_each, warps, *_ = config or tuned("l2_norm", rows, n, x.element_size(), rule)
    launch(
        l2_norm_kernel, ((rows + rows_each - 1) // rows_each,), x, y, rows, eps, STRIDE=stride, N=n,
        BLOCK=block,
        ROWS=rows_each, num_warps=warps,
    )  # fmt: skip
    return y


@l2_norm.backward
def _(saved, dy):
    return backward(dy, saved.x, saved.eps)


def backward(dy, x, eps, config=None):
    """dx = (dy - y sum(y dy)) / ‖x‖; of a row that eps holds up, dy / eps. Grid: rows /
    rows_each.
    """
    n, dx = number(x.shape[-1]), torch.empty_like(x)
    (dy, _, dy_stride), (x, rows, stride) = rows_as_in(dx, dy), rows_as_in(dx, x)
    rule = row_config(n, 2 * x.element_size())
    block, rows_each, warps, *_ = config or tuned(
        "l2_norm backward", rows, n, x.element_size(), rule
    )
    launch(
        l2_norm_backward_kernel, ((rows + rows_each - 1) // rows_each,), dy, x, dx, rows, eps,
        DY_STRIDE=dy_stride,
        STRIDE=stride, N=n, BLOCK=block, ROWS=rows_each, num_warps=warps,
    )  # fmt: skip
    return dx


# Bytes: x once, y once. A row of one block is read once: the compiler joins the two loads. Of
# others the second reading comes from L2.
@triton.jit
def l2_norm_kernel(
    X, Y, rows, eps, STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(X + row * STRIDE + col, (row < rows) & (col < N), 0.0).to(tl.float32)
        squares += x * x
    inverse, _ = inverse_norm(squares, eps)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(X + row * STRIDE + col, (row < rows) & (col < N), 0.0).to(tl.float32)
        tl.store(Y + row * N + col, x * inverse, (row < rows) & (col < N))


# Bytes: dy and x once, dx once; second readings as above.
@triton.jit
def l2_norm_backward_kernel(
    DY, X, DX, rows, eps, DY_STRIDE: tl.constexpr, STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        keep = (row < rows) & (col < N)
        x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
        squares += x * x
        products += x * tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
    inverse, held_up = inverse_norm(squares, eps)
    along = tl.sum(products, 1, keep_dims=True) * inverse
    along = tl.where(held_up, 0.0, along) * inverse
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        keep = (row < rows) & (col < N)
        x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
        dy = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        tl.store(DX + row * N + col, (dy - x * along) * inverse, keep)


@triton.jit
def inverse_norm(squares, eps):
    """1 / max(norm, eps) of each row, and whether eps was the larger; NaN stays NaN."""
    norm = tl.sqrt(tl.sum(squares, 1, keep_dims=True))
    held_up = norm < 0.0
    if eps is not None:
        held_up = norm < tl.cast(eps, tl.float32)
        norm = tl.where(held_up, tl.cast(eps, tl.float32), norm)
    return 1.0 / norm, held_up


@l2_norm.inputs(dict(rows=7, n=100), dict(rows=65536, n=1024))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-12
