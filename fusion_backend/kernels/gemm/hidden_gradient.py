"""The gradient that comes back into the hidden layer of an MLP, from dy W₃ᵀ to the gradients of
what was activated, in one pass.

With h = act(gate), or act(gate) · up in a gated one, and dh = dy W₃ᵀ: d_gate = dh · up · act'(gate)
and d_up = dh · act(gate). h is computed again beside them, for the gradient of W₃, so that forward
need not keep it; and the columns are summed, for the gradients of the biases. Sums in fp32, each
result rounded once. 16-bit dtypes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.gemm.epilogue import epilogue, slope
from fusion_backend.kernels.gemm.main_loop import (
    corner,
    halves,
    multiply,
    weight_matrix,
    weight_tile,
)
from fusion_backend.kernels.gemm.operands import aligned_rows, by_output, distance_of, precision
from fusion_backend.kernels.gemm.tiles import Tile, programs, tile_for


def hidden_gradient(
    dy: Tensor, w: Tensor, gate: Tensor, up: Tensor | None, act: str, sums: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The hidden layer h, d_gate, d_up (empty without up), and the sums of their columns in fp32,
    None unless asked for.

    dy is `[..., o]`, w `[o, n]`, W₃ transposed; gate and up `[..., n]`. The results are contiguous.
    Grid: programs that walk through the tiles of d_gate.
    """
    (k, n), shape = w.shape, gate.shape
    hidden, d_gate = torch.empty_like(gate), torch.empty_like(gate)
    d_up = torch.empty(shape if up is not None else (0,), dtype=gate.dtype, device=gate.device)
    dy, m, dy_row = aligned_rows(dy)
    gate, up = gate.contiguous(), None if up is None else up.contiguous()
    if tile is None:
        tile = tile_for(dy, m, k, n)
        # of larger pieces the registers could not hold what is read and what is stored
        tile = tile._replace(pieces=min(4, tile.bn // 32))
    down = (m + tile.bm - 1) // tile.bm
    parts = [
        torch.empty((down, n), dtype=torch.float32, device=gate.device) if wanted else None
        for wanted in (sums, sums and up is not None)
    ]
    launch(
        hidden_gradient_kernel, (programs(tile, m, n, dy.device),), dy, w, gate, up,
        hidden, d_gate, None if up is None else d_up, *parts, m,
        N=n, K=k, DY_ROW=dy_row, W_STRIDE=distance_of(w), BY_OUTPUT=by_output(w), ACT=act,
        PRECISION=precision(), UPCAST=interpreted(hidden_gradient_kernel), **tile.constants,
    )  # fmt: skip
    return hidden, d_gate, d_up, *(None if part is None else part.sum(0) for part in parts)


# Operations: 2 m n k. Bytes: dy, W, gate and up read; h, d_gate and d_up written.
@triton.jit
def hidden_gradient_kernel(
    DY, W, GATE, UP, HIDDEN, D_GATE, D_UP, GATE_SUMS, UP_SUMS, m,
    N: tl.constexpr, K: tl.constexpr, DY_ROW: tl.constexpr, W_STRIDE: tl.constexpr,
    BY_OUTPUT: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = BN // PIECES
    dy = tl.make_tensor_descriptor(DY, [m, K], [DY_ROW, 1], [BM, BK])
    w = weight_matrix(W, N, K, W_STRIDE, BY_OUTPUT, BN, BK)
    gate = tl.make_tensor_descriptor(GATE, [m, N], [N, 1], [BM, STORED])
    hidden = tl.make_tensor_descriptor(HIDDEN, [m, N], [N, 1], [BM, STORED])
    d_gate = tl.make_tensor_descriptor(D_GATE, [m, N], [N, 1], [BM, STORED])
    up = None
    d_up = None
    if UP is not None:
        up = tl.make_tensor_descriptor(UP, [m, N], [N, 1], [BM, STORED])
        d_up = tl.make_tensor_descriptor(D_UP, [m, N], [N, 1], [BM, STORED])
    tiles = tl.cdiv(m, BM) * ((N + BN - 1) // BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        top, left = corner(tile, m, N, BM, BN, GROUP)
        dh = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK):
            part = weight_tile(w, start, left, BY_OUTPUT)
            dh = multiply(dy.load([top, start]), part, dh, PRECISION, UPCAST)
        if PIECES == 1:
            finish(
                dh, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
                N, ACT, BM, STORED,
            )  # fmt: skip
        else:
            first, second = halves(dh, BM, BN)
            finish_half(
                first, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
                N, ACT, BM, STORED, PIECES,
            )  # fmt: skip
            finish_half(
                second, top, left + BN // 2, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
                N, ACT, BM, STORED, PIECES,
            )  # fmt: skip


@triton.jit
def finish_half(
    dh, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
    N: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Half of a tile, whole or in two pieces."""
    if PIECES == 2:
        finish(
            dh, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
            N, ACT, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        first, second = halves(dh, ROWS, 2 * COLUMNS)
        finish(
            first, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
            N, ACT, ROWS, COLUMNS,
        )  # fmt: skip
        finish(
            second, top, left + COLUMNS, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
            N, ACT, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def finish(
    dh, top, left, gate, up, hidden, d_gate, d_up, GATE_SUMS, UP_SUMS,
    N: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the gradient of h, a tile or half of one, to what is stored. Beyond the last row it is
    zero, and so are the gradients that are summed.
    """
    KIND: tl.constexpr = gate.dtype
    column = left + tl.arange(0, COLUMNS)
    at = (top // ROWS).to(tl.int64) * N + column
    x = gate.load([top, left]).to(tl.float32)
    h = epilogue(x, ACT, True)
    if up is not None:
        d = dh * h
        if UP_SUMS is not None:
            tl.store(UP_SUMS + at, tl.sum(d, 0), column < N)
        d_up.store([top, left], d.to(KIND))
        factor = up.load([top, left]).to(tl.float32)
        h *= factor
        dh *= factor
    hidden.store([top, left], h.to(KIND))
    dh *= slope(x, ACT)
    if GATE_SUMS is not None:
        tl.store(GATE_SUMS + at, tl.sum(dh, 0), column < N)
    d_gate.store([top, left], dh.to(KIND))
