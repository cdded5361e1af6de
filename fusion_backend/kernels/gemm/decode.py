"""A linear layer of a few rows, as in the steps of a decoder: act(x W + b) and act(x W1 + b1) ·
(x W2 + b2).

Such a step waits for the weights, which are read once. A program has BN columns of the result and
reads all of their weights. Split-K was slower at every size that was timed, even where there were
fewer programs than multiprocessors. One row is multiplied without tensor cores. Sums are in fp32
and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import as_rows
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.gemm.epilogue import epilogue
from fusion_backend.kernels.gemm.main_loop import multiply
from fusion_backend.kernels.gemm.operands import by_output, distance_of, precision

FEW = 64  # rows up to which a step only streams the weights
FEWER = 16  # rows up to which this is faster than the library's product, even without an epilogue


def is_few(rows, most: int = FEW) -> bool:
    """Are these few rows, and is that known?"""
    return statically_known_true(rows <= most)


def sizes(
    m, k: int, n: int, weights: int, itemsize: int, processors: int, laid_by_output: bool
) -> dict[str, int]:
    """The blocks, warps and stages of `decode_kernel`, or, without BM, those of `vector_kernel`."""
    if laid_by_output and statically_known_true(m <= 1):
        bk = min(triton.next_power_of_2(k), 8192 // itemsize)
        bn = max(1, 4096 // itemsize // bk)
        return dict(BN=bn, BK=bk, num_warps=max(2, weights * bn * bk // 2048))
    rows = next((r for r in (16, 32) if statically_known_true(m <= r)), FEW)
    if n >= 64 * processors:
        bn, deep = (64, 2) if laid_by_output else (128, 1)
    else:
        bn, deep = (16 if laid_by_output and rows == 16 else 32), 2
    return dict(
        BM=rows, BN=bn, BK=128 * deep // itemsize, num_warps=2 if bn == 16 else 4, num_stages=4
    )


def decode(
    x: Tensor, w: Tensor, b: Tensor | None, act: str,
    w2: Tensor | None = None, b2: Tensor | None = None,
    constants: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """act(x W + b) `[..., n]`, contiguous; with w2: act(x W + b) · (x W2 + b2).

    x is `[..., k]` with at most 64 rows, w and w2 `[k, n]`, as `operands.reject_product` asks; b
    and b2 `[n]` or None. Grid: blocks of columns.
    """
    (k, n), both = w.shape, [w] if w2 is None else [w, w2]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, m, x_row = as_rows(x)
    if constants is None:
        processors, laid_by_output = multiprocessors(x.device), all(map(by_output, both))
        constants = sizes(m, k, n, len(both), x.element_size(), processors, laid_by_output)
    one = "BM" not in constants
    kernel = vector_kernel if one else decode_kernel
    if not one:
        constants = constants | dict(
            X_ROW=x_row, BY_OUTPUT=by_output(w), BY_OUTPUT2=w2 is not None and by_output(w2),
            PRECISION=precision(),
        )  # fmt: skip
    launch(
        kernel, (-(-n // constants["BN"]),), x, w, w2, b, b2, out, m,
        N=n, K=k, W_STRIDE=distance_of(w), W2_STRIDE=0 if w2 is None else distance_of(w2),
        ACT=act, INTERPRETED=interpreted(kernel), **constants,
    )  # fmt: skip
    return out


# Bytes: the weights once; x from the L2 for each block of columns.
@triton.jit
def decode_kernel(
    X, W, W2, B, B2, OUT, m, N: tl.constexpr, K: tl.constexpr, W_STRIDE: tl.constexpr,
    W2_STRIDE: tl.constexpr, ACT: tl.constexpr, INTERPRETED: tl.constexpr, X_ROW: tl.constexpr,
    BY_OUTPUT: tl.constexpr, BY_OUTPUT2: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    y = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK):
        step = start + tl.arange(0, BK)
        keep = (row[:, None] < m) & (step[None, :] < K)
        x = tl.load(X + row.to(tl.int64)[:, None] * X_ROW + step[None, :], keep, 0.0)
        part = few_columns(W, step, column, N, K, W_STRIDE, BY_OUTPUT)
        y = multiply(x, part, y, PRECISION, INTERPRETED)
        if W2 is not None:
            part = few_columns(W2, step, column, N, K, W2_STRIDE, BY_OUTPUT2)
            up = multiply(x, part, up, PRECISION, INTERPRETED)
    KIND: tl.constexpr = OUT.dtype.element_ty
    y = activated_product(y, up, B, B2, column, N, ACT, W2 is not None, KIND, INTERPRETED)
    keep = (row[:, None] < m) & (column[None, :] < N)
    tl.store(OUT + row[:, None] * N + column[None, :], y, keep)


# One row, and weights that lie in memory by their outputs. Bytes as above.
@triton.jit
def vector_kernel(
    X, W, W2, B, B2, OUT, m, N: tl.constexpr, K: tl.constexpr, W_STRIDE: tl.constexpr,
    W2_STRIDE: tl.constexpr, ACT: tl.constexpr, INTERPRETED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    y = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for start in tl.range(0, K, BK):
        step = start + tl.arange(0, BK)
        x = tl.load(X + step, (step < K) & (m > 0), 0.0).to(tl.float32)[None, :]
        y += x * by_columns(W, step, column, N, K, W_STRIDE).to(tl.float32)
        if W2 is not None:
            up += x * by_columns(W2, step, column, N, K, W2_STRIDE).to(tl.float32)
    KIND: tl.constexpr = OUT.dtype.element_ty
    result = activated_product(
        tl.sum(y, 1), tl.sum(up, 1), B, B2, column, N, ACT, W2 is not None, KIND, INTERPRETED
    )
    tl.store(OUT + column, result, (column < N) & (m > 0))


@triton.jit
def few_columns(
    W, step, column, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
):  # fmt: skip
    """The tile `[BK, BN]` of a weight, in the order of its memory; offsets in 64 bits."""
    if BY_OUTPUT:
        tile = by_columns(W, step, column, N, K, STRIDE).T
    else:
        at = step.to(tl.int64)[:, None] * STRIDE + column[None, :]
        tile = tl.load(W + at, (step[:, None] < K) & (column[None, :] < N), 0.0)
    return tile


@triton.jit
def by_columns(W, step, column, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr):
    """The tile `[BN, BK]` of a weight that has a row of memory for each output."""
    at = column.to(tl.int64)[:, None] * STRIDE + step[None, :]
    return tl.load(W + at, (column[:, None] < N) & (step[None, :] < K), 0.0)


@triton.jit
def activated_product(
    y, up, B, B2, column, N: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """From the sums of products to what is stored. column broadcasts from the last dimension."""
    if B is not None:
        y += tl.load(B + column, column < N, 0.0).to(tl.float32)
    y = epilogue(y, ACT, KIND, INTERPRETED)
    if GATED:
        if B2 is not None:
            up += tl.load(B2 + column, column < N, 0.0).to(tl.float32)
        y *= up
    return y.to(KIND)
