"""A linear layer of one row or a few without tensor cores: act(x W + b) and act(x W1 + b1) ·
(x W2 + b2). benchmarks.sweep times it beside decode.py; no pattern uses it yet.

A program has BN columns of the result and reads their weights from the first to the last, so that
there are no shares to add up. Sums in fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import as_rows
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.gemm.decode import activated_product
from fusion_backend.kernels.gemm.operands import distance_of

ROWS = 4


def gemv(
    x: Tensor, w: Tensor, b: Tensor | None, act: str, w2: Tensor | None, b2: Tensor | None,
    constants: dict[str, int],
) -> Tensor:  # fmt: skip
    """act(x W + b) `[..., n]`, contiguous; with w2: act(x W + b) · (x W2 + b2).

    x is `[..., k]` with at most ROWS rows, the weights `[k, n]` by their outputs; b and b2 `[n]` or
    None. Grid: blocks of columns.
    """
    k, n = w.shape
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, m, x_row = as_rows(x)
    rows = next((r for r in (1, 2) if statically_known_true(m <= r)), ROWS)
    launch(
        gemv_kernel, (-(-n // constants["BN"]),), x, w, w2, b, b2, out, m,
        N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w),
        W2_STRIDE=0 if w2 is None else distance_of(w2),
        ACT=act, ROWS=rows, INTERPRETED=interpreted(gemv_kernel), **constants,
    )  # fmt: skip
    return out


# Bytes: the weights once; x from the L2 for each block of columns.
@triton.jit
def gemv_kernel(
    X, W, W2, B, B2, OUT, m, N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr,
    W_STRIDE: tl.constexpr, W2_STRIDE: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    y = tl.zeros([ROWS, BN, BK], tl.float32)
    up = tl.zeros([ROWS, BN, BK], tl.float32)
    for start in range(0, K, BK):
        step = start + tl.arange(0, BK)
        keep = (row[:, None] < m) & (step[None, :] < K)
        x = tl.load(X + row[:, None] * X_ROW + step[None, :], keep, 0.0).to(tl.float32)
        y += x[:, None, :] * columns_of(W, column, step, N, K, W_STRIDE)
        if W2 is not None:
            up += x[:, None, :] * columns_of(W2, column, step, N, K, W2_STRIDE)
    KIND: tl.constexpr = OUT.dtype.element_ty
    result = activated_product(
        tl.sum(y, 2), tl.sum(up, 2), B, B2, column, N, ACT, W2 is not None, KIND, INTERPRETED
    )
    keep = (row[:, None] < m) & (column[None, :] < N)
    tl.store(OUT + row[:, None] * N + column[None, :], result, keep)


@triton.jit
def columns_of(W, column, step, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr):
    """`[1, BN, BK]` of a weight that has a row of memory for each column; offsets in 64 bits."""
    at = column.to(tl.int64)[:, None] * STRIDE + step[None, :]
    keep = (column[:, None] < N) & (step[None, :] < K)
    return tl.load(W + at, keep, 0.0).to(tl.float32)[None, :, :]
