"""A gated linear unit in one pass over x: sigmoid(x W1 + b1) · (x W2 + b2).

A program has a tile of the result and two accumulators, one for each product. Sums in fp32, rounded
once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import as_rows, dynamic
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.reporting.reject import Reject


def tile_config(x: Tensor) -> dict:
    """Tiles whose two accumulators fill the registers; for fp32 smaller ones, as a stage takes
    twice the memory.
    """
    if x.dtype == torch.float32:
        return dict(BM=64, BN=64, BK=32, GROUP=8, num_warps=4, num_stages=3)
    short = statically_known_true(math.prod(x.shape[:-1]) <= 64)
    return dict(
        BM=64 if short else 128, BN=128, BK=64, GROUP=8, num_warps=4 if short else 8, num_stages=4
    )


def reject_weights(x: Tensor, w1: Tensor, w2: Tensor) -> Reject | None:
    """Refuse what is no product of rows with two weights of one known shape."""
    if x.dim() < 2 or w1.dim() != 2 or w2.dim() != 2:
        return Reject(
            f"x has {x.dim()} dimensions, w1 {w1.dim()} and w2 {w2.dim()}; at least 2, 2 and 2 "
            "are needed"
        )
    sizes = (*w1.shape, *w2.shape, *w1.stride(), *w2.stride())
    if any(dynamic(size) for size in sizes):
        return Reject("a weight has a dynamic shape")
    if tuple(w1.shape) != tuple(w2.shape):
        return Reject(f"w1 has shape {tuple(w1.shape)} and w2 {tuple(w2.shape)}")
    pairs = [zip(w.shape, w.stride(), strict=True) for w in (w1, w2)]
    if max(size * stride for pair in pairs for size, stride in pair) >= 2**31:
        return Reject(f"weights of {tuple(w1.shape)} exceed offsets of 32 bits")
    return None


def forward(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, save: bool,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sigmoid(x W1 + b1) · (x W2 + b2) `[..., n]`, and the gate x W1 + b1, empty unless saved.

    x is `[..., k]`, its columns one element apart (else it is copied); w1 and w2 `[k, n]` with any
    strides; b1 and b2 `[n]`, contiguous, or None; all of one dtype: fp32, bf16 or fp16. The results
    are contiguous. Grid: tiles of BM rows and BN columns of the result.
    """
    config = tile_config(x) if config is None else config
    (k, n), shape = w1.shape, (*x.shape[:-1], w1.shape[1])
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    gate = torch.empty(shape if save else (0,), dtype=x.dtype, device=x.device)
    x, m, stride = as_rows(x)
    tiles = ((m + config["BM"] - 1) // config["BM"]) * ((n + config["BN"] - 1) // config["BN"])
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch(
        gated_linear_kernel, (tiles,), x, w1, b1, w2, b2, out, gate if save else None, m,
        N=n, K=k, X_ROW=stride,
        W1_ROW=w1.stride(0), W1_COL=w1.stride(1), W2_ROW=w2.stride(0), W2_COL=w2.stride(1),
        PRECISION=precision, UPCAST=interpreted(gated_linear_kernel), **config,
    )  # fmt: skip
    return out, gate


# Operations: 4 m n k. Bytes: x, w1, w2 and the output once, gate where saved.
@triton.jit
def gated_linear_kernel(
    X, W1, B1, W2, B2, OUT, GATE, m,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr,
    W1_ROW: tl.constexpr, W1_COL: tl.constexpr, W2_ROW: tl.constexpr, W2_COL: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs that run together share rows of x and columns of the weights: GROUP tiles down, then
    # one to the right.
    down = tl.cdiv(m, BM)
    across: tl.constexpr = (N + BN - 1) // BN
    group = tl.program_id(0) // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    top = (group * GROUP + (tl.program_id(0) % (GROUP * across)) % height) * BM
    left = (tl.program_id(0) % (GROUP * across)) // height * BN
    # Scalar pointers in 64 bits, offsets within a tile in 32. Rows and columns beyond the edge
    # repeat others inside it, so that the loop needs no mask for them.
    row = tl.arange(0, BM)
    col = (left + tl.arange(0, BN)) % N
    step = tl.arange(0, BK)
    X += top.to(tl.int64) * X_ROW
    x_at = tl.minimum(row, m - top - 1)[:, None] * X_ROW + step[None, :]
    w1_at = step[:, None] * W1_ROW + col[None, :] * W1_COL
    w2_at = step[:, None] * W2_ROW + col[None, :] * W2_COL
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK):
        if K % BK == 0:
            x = tl.load(X + x_at)
            w1 = tl.load(W1 + w1_at)
            w2 = tl.load(W2 + w2_at)
        else:
            x = tl.load(X + x_at, step[None, :] < K - start, 0.0)
            w1 = tl.load(W1 + w1_at, step[:, None] < K - start, 0.0)
            w2 = tl.load(W2 + w2_at, step[:, None] < K - start, 0.0)
        if UPCAST:  # the interpreter multiplies bf16 wrongly
            x, w1, w2 = x.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32)
        gate = tl.dot(x, w1, gate, input_precision=PRECISION)
        up = tl.dot(x, w2, up, input_precision=PRECISION)
        X += BK
        W1 += BK * W1_ROW
        W2 += BK * W2_ROW
    if B1 is not None:
        gate += tl.load(B1 + col).to(tl.float32)[None, :]
    if B2 is not None:
        up += tl.load(B2 + col).to(tl.float32)[None, :]
    corner = top.to(tl.int64) * N + left
    out = row[:, None] * N + tl.arange(0, BN)[None, :]
    keep = (row[:, None] < m - top) & (tl.arange(0, BN)[None, :] < N - left)
    tl.store(OUT + corner + out, tl.sigmoid(gate) * up, keep)  # last, it would spill registers
    if GATE is not None:
        tl.store(GATE + corner + out, gate, keep)
