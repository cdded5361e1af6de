"""Rows of unit length, x / max(‖x‖, eps), and their gradient.

The sum of squares is taken in fp32. Backward keeps x alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import number, rows_as_in
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, row_config, tuned


def forward(x: Tensor, eps: float | None, config: Config | None = None) -> Tensor:
    """x / max(‖x‖, eps) of each row of x `[..., n]` in fp32, bf16 or fp16; without eps, x / ‖x‖.

    x has any strides; the result lies in memory as torch.empty_like(x) does, in x's dtype.
    Grid: rows / config.rows.
    """
    n, y = number(x.shape[-1]), torch.empty_like(x)
    x, rows, stride = rows_as_in(y, x)
    rule = row_config(n, x.element_size())
    block, rows_each, warps, *_ = config or tuned("l2_norm", rows, n, x.element_size(), rule)
    launch(
        l2_norm_kernel, ((rows + rows_each - 1) // rows_each,), x, y, rows, eps,
        STRIDE=stride, N=n, BLOCK=block, ROWS=rows_each, num_warps=warps,
    )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, eps: float | None, config: Config | None = None) -> Tensor:
    """dx = (dy - y sum(y dy)) / ‖x‖; of a row that is shorter than eps, dy / eps.

    dy and x are `[..., n]` of one dtype and any strides; dx lies in memory as torch.empty_like(x).
    Grid: rows / config.rows.
    """
    n, dx = number(x.shape[-1]), torch.empty_like(x)
    (dy, _, dy_stride), (x, rows, stride) = rows_as_in(dx, dy), rows_as_in(dx, x)
    rule = row_config(n, 2 * x.element_size())
    block, rows_each, warps, *_ = config or tuned(
        "l2_norm backward", rows, n, x.element_size(), rule
    )
    launch(
        l2_norm_backward_kernel, ((rows + rows_each - 1) // rows_each,), dy, x, dx, rows, eps,
        DY_STRIDE=dy_stride, STRIDE=stride, N=n, BLOCK=block, ROWS=rows_each, num_warps=warps,
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
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
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
    inverse, clamped = inverse_norm(squares, eps)
    along = tl.sum(products, 1, keep_dims=True) * inverse
    along = tl.where(clamped, 0.0, along) * inverse
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
    clamped = norm < 0.0
    if eps is not None:
        clamped = norm < tl.cast(eps, tl.float32)
        norm = tl.where(clamped, tl.cast(eps, tl.float32), norm)
    return 1.0 / norm, clamped
