"""A linear layer of a few rows, as in the steps of a decoder: act(x W + b) and act(x W1 + b1) ·
(x W2 + b2).

Such a step waits for the weights, which are read once. A program has BN columns of the result, and
a share of the rows of the weights where there are too few columns to keep the GPU reading; a second
kernel then adds the shares. Sums in fp32, rounded once.
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
PROGRAMS = 4  # a multiprocessor, that read at the same time


def is_few(rows) -> bool:
    """Are these few rows, and is that known?"""
    return statically_known_true(rows <= FEW)


def sizes(m, k: int, n: int, weights: int, itemsize: int, processors: int) -> dict[str, int]:
    """The constants of the kernel: blocks, and in how many shares the weights are divided."""
    bk = 256 // itemsize
    bn = 64
    columns = -(-n // bn)
    most = max(1, k // (4 * bk))  # a share of fewer blocks would end before its loads overlap
    shares = 1 if columns >= 2 * processors else -(-PROGRAMS * processors // columns)
    shares = min(shares, most)
    blocks = -(-k // bk)
    share = -(-blocks // shares) * bk
    rows = next((r for r in (16, 32) if statically_known_true(m <= r)), FEW)
    return dict(
        BM=rows, BN=bn, BK=bk, SHARE=share,
        SHARES=-(-k // share), num_warps=4, num_stages=4,
    )  # fmt: skip


def decode(
    x: Tensor, w: Tensor, b: Tensor | None, act: str,
    w2: Tensor | None = None, b2: Tensor | None = None,
    constants: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """act(x W + b) `[..., n]`, contiguous; with w2: act(x W + b) · (x W2 + b2).

    x is `[..., k]` with at most 64 rows, w and w2 `[k, n]`, as `operands.reject_product` asks; b
    and b2 `[n]` or None. Grid: blocks of columns, and shares of the weights' rows.
    """
    (k, n), weights = w.shape, 1 if w2 is None else 2
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, m, x_row = as_rows(x)
    if constants is None:
        constants = sizes(m, k, n, weights, x.element_size(), multiprocessors(x.device))
    shares = constants["SHARES"]
    parts = None
    if shares > 1:
        parts = torch.empty((shares, weights, m, n), dtype=torch.float32, device=x.device)
    launch(
        decode_kernel, (-(-n // constants["BN"]), shares), x, w, w2, b, b2,
        out if parts is None else None, parts, m,
        N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w), BY_OUTPUT=by_output(w),
        W2_STRIDE=0 if w2 is None else distance_of(w2),
        BY_OUTPUT2=w2 is not None and by_output(w2),
        ACT=act, PRECISION=precision(), UPCAST=interpreted(decode_kernel), **constants,
    )  # fmt: skip
    if parts is not None:
        launch(
            decode_sum_kernel, ((m * n + 1023) // 1024,), parts, b, b2, out, m,
            N=n, ACT=act, SHARES=shares, GATED=w2 is not None,
            INTERPRETED=interpreted(decode_sum_kernel), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


# Bytes: the weights once; x from the L2 for each block of columns.
@triton.jit
def decode_kernel(
    X, W, W2, B, B2, OUT, PARTS, m,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, W_STRIDE: tl.constexpr,
    BY_OUTPUT: tl.constexpr, W2_STRIDE: tl.constexpr, BY_OUTPUT2: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * SHARE
    y = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(first, min(first + SHARE, K), BK):
        step = start + tl.arange(0, BK)
        keep = (row[:, None] < m) & (step[None, :] < K)
        x = tl.load(X + row[:, None] * X_ROW + step[None, :], keep, 0.0)
        part = few_columns(W, step, column, N, K, W_STRIDE, BY_OUTPUT)
        y = multiply(x, part, y, PRECISION, UPCAST)
        if W2 is not None:
            part = few_columns(W2, step, column, N, K, W2_STRIDE, BY_OUTPUT2)
            up = multiply(x, part, up, PRECISION, UPCAST)
    at = row[:, None] * N + column[None, :]
    keep = (row[:, None] < m) & (column[None, :] < N)
    if SHARES == 1:
        KIND: tl.constexpr = OUT.dtype.element_ty
        y = activated_product(y, up, B, B2, column, N, ACT, W2 is not None, KIND, UPCAST)
        tl.store(OUT + at, y, keep)
    else:
        PARTS += tl.program_id(1) * (2 if W2 is not None else 1) * m * N
        tl.store(PARTS + at, y, keep)
        if W2 is not None:
            tl.store(PARTS + m * N + at, up, keep)


@triton.jit
def few_columns(
    W, step, column, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
):  # fmt: skip
    """The tile `[BK, BN]` of a weight, in the order of its memory; offsets in 64 bits."""
    if BY_OUTPUT:
        at = column.to(tl.int64)[:, None] * STRIDE + step[None, :]
        tile = tl.load(W + at, (column[:, None] < N) & (step[None, :] < K), 0.0).T
    else:
        at = step.to(tl.int64)[:, None] * STRIDE + column[None, :]
        tile = tl.load(W + at, (step[:, None] < K) & (column[None, :] < N), 0.0)
    return tile


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


@triton.jit
def decode_sum_kernel(
    PARTS, B, B2, OUT, m, N: tl.constexpr, ACT: tl.constexpr, SHARES: tl.constexpr,
    GATED: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The shares added, in a fixed order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < m * N
    WEIGHTS: tl.constexpr = 2 if GATED else 1
    y = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for share in tl.static_range(SHARES):
        y += tl.load(PARTS + share * WEIGHTS * m * N + at, keep, 0.0)
        if GATED:
            up += tl.load(PARTS + (share * WEIGHTS + 1) * m * N + at, keep, 0.0)
    KIND: tl.constexpr = OUT.dtype.element_ty
    y = activated_product(y, up, B, B2, at % N, N, ACT, GATED, KIND, INTERPRETED)
    tl.store(OUT + at, y, keep)
