"""The gradient that comes back into the hidden layer of an MLP: from dy W₂ᵀ to the gradient of what
was activated, in one pass.

With dh = dy W₂ᵀ: d = dh · act'(pre) · scale. Its columns are summed, for the gradient of the bias.
Sums in fp32, the result rounded once. 16-bit dtypes. Where the tile has finishers, the kernel of
specialised_gradient.py runs, which rounds dh as well, as Inductor does.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.gemm.epilogue import slope
from fusion_backend.kernels.gemm.main_loop import (
    corner,
    halves,
    multiply,
    weight_matrix,
    weight_tile,
)
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of, precision
from fusion_backend.kernels.gemm.specialised_gradient import takes_gradient
from fusion_backend.kernels.gemm.tiles import Tile, programs, tile_for


def hidden_gradient(
    dy: Tensor, w: Tensor, pre: Tensor, b: Tensor | None, act: str, sums: bool,
    tile: Tile | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dy W · act'(pre + b) · scale, and the sums of its columns in fp32, None unless asked for.

    dy is `[..., o]`, w `[o, n]`, W₂ transposed; pre `[..., n]`, b `[n]` or None. scale: 1 / (1 - p)
    of the dropout behind the activation, if there is one; pre is `epilogue.LOWEST` where it dropped
    an element. The result is contiguous. Grid: programs that walk through its tiles.
    """
    k, n = w.shape
    tile = gradient_tile(dy, w, act) if tile is None else tile
    pre = pre.contiguous()
    if tile.finishers:
        found = torch.ops.fusion.specialised_gradient(dy, w, pre, b, act, scale, sums, list(tile))
        return found[0], found[1].sum(0) if sums else None
    d = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    dy, m, dy_row = aligned_rows(dy)
    parts = None
    if sums:
        parts = torch.empty(
            ((m + tile.bm - 1) // tile.bm, n), dtype=torch.float32, device=pre.device
        )
    launch(
        hidden_gradient_kernel, (programs(tile, m, n, dy.device),), dy, w, pre, b, d, parts, m,
        N=n, K=k, DY_ROW=dy_row, W_STRIDE=distance_of(w), BY_OUTPUT=by_output(w), ACT=act,
        SCALE=scale, PRECISION=precision(), UPCAST=interpreted(hidden_gradient_kernel),
        **tile.constants,
    )  # fmt: skip
    return d, None if parts is None else parts.sum(0)


def gradient_tile(dy: Tensor, w: Tensor, act: str) -> Tile:
    (k, n), rows = w.shape, math.prod(dy.shape[:-1])
    return tile_for(dy, rows, k, n, specialised=takes_gradient(dy, act))


# Operations: 2 m n k. Bytes: dy, W and pre read, d written.
@triton.jit
def hidden_gradient_kernel(
    DY, W, PRE, B, D, SUMS, m,
    N: tl.constexpr, K: tl.constexpr, DY_ROW: tl.constexpr, W_STRIDE: tl.constexpr,
    BY_OUTPUT: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = BN // PIECES
    dy = tl.make_tensor_descriptor(DY, [m, K], [DY_ROW, 1], [BM, BK])
    w = weight_matrix(W, N, K, W_STRIDE, BY_OUTPUT, BN, BK)
    pre = tl.make_tensor_descriptor(PRE, [m, N], [N, 1], [BM, STORED])
    out = tl.make_tensor_descriptor(D, [m, N], [N, 1], [BM, STORED])
    tiles = tl.cdiv(m, BM) * ((N + BN - 1) // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        dh = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK):
            part = weight_tile(w, start, left, BY_OUTPUT)
            dh = multiply(dy.load([top, start]), part, dh, PRECISION, UPCAST)
        if PIECES == 1:
            finish(dh, top, left, pre, B, out, SUMS, N, ACT, SCALE, UPCAST, BM, STORED)
        else:
            first, second = halves(dh, BM, BN)
            finish(first, top, left, pre, B, out, SUMS, N, ACT, SCALE, UPCAST, BM, STORED)
            finish(second, top, left + STORED, pre, B, out, SUMS, N, ACT, SCALE, UPCAST, BM, STORED)


@triton.jit
def finish(
    dh, top, left, pre, B, out, SUMS,
    N: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr, INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the gradient of the hidden layer, a tile or half of one, to what is stored. Beyond the
    last row it is zero, and so is what is summed.
    """
    KIND: tl.constexpr = out.dtype
    column = left + tl.arange(0, COLUMNS)
    before = pre.load([top, left]).to(tl.float32)
    if B is not None:
        before += tl.load(B + column, column < N, 0.0).to(tl.float32)[None, :]
    dh *= slope(before, ACT, KIND, INTERPRETED) * SCALE
    if SUMS is not None:
        at = (top // ROWS).to(tl.int64) * N + column
        tl.store(SUMS + at, tl.sum(dh, 0), column < N)
    out.store([top, left], dh.to(KIND))
