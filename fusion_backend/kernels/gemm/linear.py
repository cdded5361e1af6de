"""A linear layer with what follows it, in one pass: act(x W + b), act(x W1 + b1) · (x W2 + b2), a
residual added, int8 scaled back, dropout of what was activated.

A program walks through tiles of the result, with one accumulator for each weight. Sums in fp32
(int32 of int8), rounded once. Where the tile has finishers, the kernel of specialised_linear.py
runs. It rounds the products before their bias is added as well, as Inductor rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.dropout import Dropout, dropout_arguments, survivors
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.gemm.epilogue import epilogue, mark
from fusion_backend.kernels.gemm.main_loop import (
    corner,
    halves,
    multiply,
    weight_matrix,
    weight_tile,
)
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of, precision
from fusion_backend.kernels.gemm.specialised_linear import tile_of
from fusion_backend.kernels.gemm.tiles import Tile, programs


def linear(
    x: Tensor, w: Tensor, b: Tensor | None, act: str, *, w2: Tensor | None = None,
    b2: Tensor | None = None, residual: Tensor | None = None,
    row_scale: Tensor | None = None, column_scale: Tensor | None = None,
    save: tuple[bool, bool] = (False, False), dtype: torch.dtype | None = None,
    dropout: Dropout | None = None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """act(x W + b) `[..., n]`, and the products without their biases, empty unless saved.

    x is `[..., k]`, w and w2 `[k, n]`, as `operands.reject_product` asks; b and b2 `[n]` or None.
    With w2: act(x W + b) · (x W2 + b2). residual `[..., n]` is added. row_scale `[m]` and
    column_scale `[n]`: of the product, before b. dtype: of the result, that of x where none is
    given. dropout: of the result, for 16-bit elements and an act that is 0 at
    `epilogue.LOWEST`, which the first product that is saved holds wherever an element is dropped.
    All results are contiguous. Grid: programs that walk through the tiles of the result.
    """
    (k, n), shape = w.shape, (*x.shape[:-1], w.shape[1])
    dtype = x.dtype if dtype is None else dtype
    able = dtype == x.dtype and residual is row_scale is column_scale is None
    tile = tile_of(x, w, act, w2, able) if tile is None else tile
    if tile.finishers:
        assert able and save[0] >= save[1], "what the kernel does not do"
        seed, p = dropout or (None, 0.0)
        op = torch.ops.fusion.specialised_linear
        given = op(x, w, b, w2, b2, seed, p, act, *save, list(tile))
        found = iter(given)
        return tuple(next(found) if keep else x.new_empty(0) for keep in (True, *save))
    out = torch.empty(shape, dtype=dtype, device=x.device)
    kept = [torch.empty(shape if s else (0,), dtype=dtype, device=x.device) for s in save]
    x, m, x_row = aligned_rows(x)
    residual, _, residual_row = (None, 0, 0) if residual is None else aligned_rows(residual)
    seed, numbers = dropout_arguments(dropout)
    launch(
        linear_kernel, (programs(tile, m, n, x.device),), x, w, w2, b, b2, residual,
        row_scale, column_scale, seed, out,
        *(t if s else None for t, s in zip(kept, save, strict=True)),
        m, N=n, K=k, X_ROW=x_row, W_STRIDE=distance_of(w),
        W2_STRIDE=0 if w2 is None else distance_of(w2), RESIDUAL_ROW=residual_row,
        BY_OUTPUT=by_output(w), BY_OUTPUT2=w2 is not None and by_output(w2), ACT=act,
        PRECISION=precision(), UPCAST=interpreted(linear_kernel), **numbers, **tile.constants,
    )  # fmt: skip
    return out, *kept


# Operations: 2 m n k a weight. Bytes: x, the weights, what is added, and the results, once.
@triton.jit
def linear_kernel(
    X, W, W2, B, B2, RESIDUAL, ROW_SCALE, COLUMN_SCALE, SEED, OUT, KEPT, KEPT2, m,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, W_STRIDE: tl.constexpr,
    W2_STRIDE: tl.constexpr, RESIDUAL_ROW: tl.constexpr, BY_OUTPUT: tl.constexpr,
    BY_OUTPUT2: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = BN // PIECES
    SUM: tl.constexpr = tl.int32 if X.dtype.element_ty == tl.int8 else tl.float32
    x = tl.make_tensor_descriptor(X, [m, K], [X_ROW, 1], [BM, BK])
    w = weight_matrix(W, N, K, W_STRIDE, BY_OUTPUT, BN, BK)
    out = tl.make_tensor_descriptor(OUT, [m, N], [N, 1], [BM, STORED])
    w2 = None
    residual = None
    kept = None
    kept2 = None
    if W2 is not None:
        w2 = weight_matrix(W2, N, K, W2_STRIDE, BY_OUTPUT2, BN, BK)
    if RESIDUAL is not None:
        residual = tl.make_tensor_descriptor(RESIDUAL, [m, N], [RESIDUAL_ROW, 1], [BM, STORED])
    if KEPT is not None:
        kept = tl.make_tensor_descriptor(KEPT, [m, N], [N, 1], [BM, STORED])
    if KEPT2 is not None:
        kept2 = tl.make_tensor_descriptor(KEPT2, [m, N], [N, 1], [BM, STORED])
    tiles = tl.cdiv(m, BM) * ((N + BN - 1) // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        y = tl.zeros([BM, BN], SUM)
        up = tl.zeros([BM, BN], SUM)
        for start in tl.range(0, K, BK):
            part = x.load([top, start])
            y = multiply(part, weight_tile(w, start, left, BY_OUTPUT), y, PRECISION, UPCAST)
            if W2 is not None:
                factor = weight_tile(w2, start, left, BY_OUTPUT2)
                up = multiply(part, factor, up, PRECISION, UPCAST)
        if PIECES == 1:
            finish(
                y, up, top, left, m, B, B2, ROW_SCALE, COLUMN_SCALE, residual, SEED, out, kept,
                kept2, N, W2 is not None, ACT, UPCAST, THRESHOLD, SCALE, BM, STORED,
            )  # fmt: skip
        else:
            first, second = halves(y, BM, BN)
            first_up, second_up = halves(up, BM, BN)
            finish(
                first, first_up, top, left, m, B, B2, ROW_SCALE, COLUMN_SCALE, residual, SEED, out,
                kept, kept2, N, W2 is not None, ACT, UPCAST, THRESHOLD, SCALE, BM, STORED,
            )  # fmt: skip
            finish(
                second, second_up, top, left + STORED, m, B, B2, ROW_SCALE, COLUMN_SCALE, residual,
                SEED, out, kept, kept2, N, W2 is not None, ACT, UPCAST, THRESHOLD, SCALE, BM,
                STORED,
            )  # fmt: skip


@triton.jit
def finish(
    y, up, top, left, m, B, B2, ROW_SCALE, COLUMN_SCALE, residual, SEED, out, kept, kept2,
    N: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, INTERPRETED: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the sums of a tile, or of half of it, to what is stored."""
    KIND: tl.constexpr = out.dtype
    column = left + tl.arange(0, COLUMNS)
    y = y.to(tl.float32)
    if ROW_SCALE is not None:
        row = top + tl.arange(0, ROWS)
        y *= tl.load(ROW_SCALE + row, row < m, 0.0).to(tl.float32)[:, None]
    if COLUMN_SCALE is not None:
        y *= tl.load(COLUMN_SCALE + column, column < N, 0.0).to(tl.float32)[None, :]
    if SEED is not None:
        counters = tile_counters(top, left, N, ROWS, COLUMNS)
        y = mark(y, survivors(tl.load(SEED), counters, THRESHOLD))
    if kept is not None:
        kept.store([top, left], y.to(KIND))
    if B is not None:
        y += tl.load(B + column, column < N, 0.0).to(tl.float32)[None, :]
    y = epilogue(y, ACT, KIND, INTERPRETED)
    if SEED is not None:
        y *= SCALE
    if GATED:
        up = up.to(tl.float32)
        if kept2 is not None:
            kept2.store([top, left], up.to(KIND))
        if B2 is not None:
            up += tl.load(B2 + column, column < N, 0.0).to(tl.float32)[None, :]
        y *= up
    if residual is not None:
        y += residual.load([top, left]).to(tl.float32)
    out.store([top, left], y.to(KIND))


@triton.jit
def tile_counters(top, left, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Those of the random numbers of a tile `[ROWS, COLUMNS]`, as `common.dropout.dropped` has
    them. Beyond the last column they are those of the next row, and of nothing that is stored.
    """
    row = (top + tl.arange(0, ROWS)).to(tl.int64) * ((N + 3) // 4)
    return row[:, None] + (left // 4 + tl.arange(0, COLUMNS // 4))[None, :]
