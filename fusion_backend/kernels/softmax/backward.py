"""Backward of softmax over rows: ds = y (dy - sum(y dy)), dx = ds · scale.

ds is the gradient of what is exponentiated, and of an additive mask before it is summed to the
mask's shape; dx is 0 where an element was dropped. Sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import as_rows, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Broadcast, Config, row_config, tuned
from fusion_backend.kernels.softmax.forward import with_mask


def backward(
    dy: Tensor, y: Tensor, x: Tensor, scale: float | None, drop: Tensor | None,
    needs: tuple[bool, bool], config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and ds `[..., n]`, contiguous, in y's dtype; None where `needs` says no.

    dy and y are `[..., n]` of any strides whose columns are one element apart (others are copied);
    of x the shape alone is asked. drop as in the forward. Grid: rows / config.rows.
    """
    n, other = number(x.shape[-1]), Broadcast(x, drop)
    dx, ds = (
        torch.empty(y.shape, dtype=y.dtype, device=y.device) if need else None for need in needs
    )
    (dy, _, dy_stride), (y, rows, y_stride) = as_rows(dy), as_rows(y)
    if config is None:
        rule = row_config(n, 2 * y.element_size())
        config = tuned("softmax backward", rows, n, y.element_size(), rule)
    short = config.block >= n
    kernel = softmax_backward_kernel if short else softmax_backward_long_kernel
    launch(
        kernel, ((rows + config.rows - 1) // config.rows,),
        dy, y, other.tensor, dx, ds, rows, *other.sizes, *other.strides,
        1.0 if scale is None else scale, DY_STRIDE=dy_stride, Y_STRIDE=y_stride, N=n,
        BLOCK=config.block, num_warps=config.warps, **(dict(ROWS=config.rows) if short else {}),
    )  # fmt: skip
    return dx, ds


# Bytes: dy and y once, dx once.
@triton.jit
def softmax_backward_kernel(
    DY, Y, DROPPED, DX, DS, rows, heads, length, mask_batch, mask_head, mask_row, mask_col, scale,
    DY_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sizes, strides = (heads, length), (mask_batch, mask_head, mask_row, mask_col)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    dy = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
    y = tl.load(Y + row * Y_STRIDE + col, keep, 0.0).to(tl.float32)
    ds = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
    if DS is not None:
        tl.store(DS + row * N + col, ds, keep)
    if DX is not None:
        if DROPPED is not None:
            ds = with_mask(ds, DROPPED, row, col, keep, sizes, strides, 0.0, True)
        tl.store(DX + row * N + col, ds * tl.cast(scale, tl.float32), keep)


# Bytes: as above; the second readings come from L2.
@triton.jit
def softmax_backward_long_kernel(
    DY, Y, DROPPED, DX, DS, rows, heads, length, mask_batch, mask_head, mask_row, mask_col, scale,
    DY_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sizes, strides = (heads, length), (mask_batch, mask_head, mask_row, mask_col)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        dy = tl.load(DY + row * DY_STRIDE + start + lane, keep, 0.0).to(tl.float32)
        sums += tl.load(Y + row * Y_STRIDE + start + lane, keep, 0.0).to(tl.float32) * dy
    total = tl.sum(sums)
    for start in tl.range(0, N, BLOCK):
        col = start + lane
        dy = tl.load(DY + row * DY_STRIDE + col, col < N, 0.0).to(tl.float32)
        ds = tl.load(Y + row * Y_STRIDE + col, col < N, 0.0).to(tl.float32) * (dy - total)
        if DS is not None:
            tl.store(DS + row * N + col, ds, col < N)
        if DX is not None:
            if DROPPED is not None:
                ds = with_mask(ds, DROPPED, row, col, col < N, sizes, strides, 0.0, True)
            tl.store(DX + row * N + col, ds * tl.cast(scale, tl.float32), col < N)
