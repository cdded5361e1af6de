"""Elementwise work with numbers for each channel: y = act((x - mean) / sqrt(var + eps) · weight +
bias).

Channels are one dimension of x. The tensor is walked through as a matrix in the order of its
memory, in which the channels are the columns (`[b, c]`, channels-last) or each row is the plane of
one (`[b, c, h, w]`). Small planes would leave much of a tile empty, and few of them begin where
wide loads may: these are walked through as one long vector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.activations import activated
from fusion_backend.kernels.common.blocks import block_of, blocks_of
from fusion_backend.kernels.common.inputs import (
    as_rows,
    dense,
    dynamic,
    memory,
    number,
    same_layout,
)
from fusion_backend.kernels.common.launch import launch
from fusion_backend.reporting.reject import Reject

SMALL = 1024  # elements below which a plane is small


class Affine(NamedTuple):
    """What each channel has, `[channels]` or None: mean and var, weight, bias; eps
    belongs to var.
    """

    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def planes_of(x: Tensor, dim: int) -> bool | None:
    """Are the rows in memory planes of one channel (True) or do they hold one number of each
    (False)? Else None.
    """
    result = torch.empty_like(x, device="meta")
    if same_layout(x, result):
        in_order = dim < x.dim() - 1 and dense(x, range(x.dim()))
        return True if in_order else False if statically_known_true(x.stride(dim) == 1) else None
    rows = dim == x.dim() - 1 and dense(result, range(x.dim()))  # padded, expanded, or to be copied
    return False if rows and statically_known_true(x.stride(dim) == 1) else None


def reject_channels(x: Tensor, dim: int) -> Reject | None:
    """Refuse tensors that are not a matrix of channels in memory, or one whose width is dynamic."""
    planes = planes_of(x, dim)
    if planes is None:
        return Reject(f"x is dense neither in its own order nor channels-last: {memory(x)}")
    if any(map(dynamic, x.shape[dim:] if planes else (x.shape[dim],))):
        return Reject("the number of channels or the size of a plane is dynamic")


def config(cols: int, planes: bool) -> tuple[int, int, int]:
    """BLOCK, rows a program and warps: 16 elements a thread. No rows: one long vector."""
    if planes and cols < SMALL:
        return 2048, 0, 4
    block = min(1024, triton.next_power_of_2(cols))
    return block, 2048 // block, 4


def forward(x: Tensor, dim: int, affine: Affine, act: str, how=None) -> Tensor:
    """y in x's shape and dtype (fp32, bf16, fp16), in memory as x is, without padding.

    dim is that of the channels; x passes reject_channels. The vectors of affine are contiguous, of
    any of the three dtypes. act is a word of common/activations.py. Grid: tiles of the matrix, or
    blocks of the vector.
    """
    channels, planes, y = number(x.shape[dim]), planes_of(x, dim), torch.empty_like(x)
    cols = math.prod(map(number, x.shape[dim + 1 :])) if planes else channels
    if same_layout(x, y):
        rows, stride = (
            math.prod(x.shape[: dim + 1] if planes else (*x.shape[:dim], *x.shape[dim + 1 :])),
            cols,
        )
    else:
        x, rows, stride = as_rows(x)
    block, rows_each, warps = how or config(cols, planes)
    if planes and not rows_each:
        (grid, last), chunk = (
            blocks_of(y.numel(), block),
            min(16 // x.element_size(), 1 << cols.bit_length() - 1),
        )
        launch(
            channels_flat_kernel, grid, x, *affine[:4], y, last, affine.eps, PLANE=cols,
            CHANNELS=channels, ACT=act, CHUNK=chunk, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return y
    grid = ((rows + rows_each - 1) // rows_each * ((cols + block - 1) // block),)
    launch(
        channels_kernel, grid, x, *affine[:4], y, rows, affine.eps, STRIDE=stride, COLS=cols,
        CHANNELS=channels, PLANES=planes, ACT=act, BLOCK=block, ROWS=rows_each, num_warps=warps,
    )  # fmt: skip
    return y


# Bytes: x once, y once.
@triton.jit
def channels_kernel(
    X, MEAN, VAR, W, B, Y, rows, eps,
    STRIDE: tl.constexpr, COLS: tl.constexpr, CHANNELS: tl.constexpr, PLANES: tl.constexpr,
    ACT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS).to(tl.int64)
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    axis: tl.constexpr = 1 if PLANES else 0
    if PLANES:
        channel, inside = row % CHANNELS, row < rows
    else:
        channel, inside = col, col < COLS
    keep = (row < rows)[:, None] & (col < COLS)[None, :]
    x = tl.load(X + row[:, None] * STRIDE + col[None, :], keep, 0.0).to(tl.float32)
    if VAR is not None:
        scale = tl.rsqrt(
            tl.load(VAR + channel, inside, 1.0).to(tl.float32) + tl.cast(eps, tl.float32)
        )
        if W is not None:
            scale *= tl.load(W + channel, inside, 0.0).to(tl.float32)
        # Not x · scale + (bias - mean · scale): far from zero that would lose the digits in which x
        # and mean differ.
        mean = tl.load(MEAN + channel, inside, 0.0).to(tl.float32)
        x = (x - tl.expand_dims(mean, axis)) * tl.expand_dims(scale, axis)
    if B is not None:
        x += tl.expand_dims(tl.load(B + channel, inside, 0.0).to(tl.float32), axis)
    tl.store(Y + row[:, None] * COLS + col[None, :], activated(x, ACT), keep)


# Bytes: x once, y once. A thread's chunk, no longer than a plane, lies in one channel or in two:
# their numbers are read once a chunk, and of the index arithmetic only a comparison is left for
# each element.
@triton.jit
def channels_flat_kernel(
    X, MEAN, VAR, W, B, Y, last, eps,
    PLANE: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    base, left = block_of(last, BLOCK)
    top = base // PLANE
    start = (base - top * PLANE).to(tl.int32) + tl.arange(0, BLOCK // CHUNK) * CHUNK
    channel = ((top % CHANNELS).to(tl.int32) + start // PLANE) % CHANNELS
    after = (channel + 1) % CHANNELS
    lane = tl.arange(0, CHUNK)[None, :]
    beyond = (start % PLANE)[:, None] + lane >= PLANE
    offset = tl.arange(0, BLOCK // CHUNK)[:, None] * CHUNK + lane
    keep = offset < left
    x = tl.load(X + base + offset, keep, 0.0).to(tl.float32)
    split: tl.constexpr = PLANE % CHUNK != 0
    if VAR is not None:
        scale = scale_of(VAR, W, channel, eps)[:, None]
        mean = tl.load(MEAN + channel).to(tl.float32)[:, None]
        if split:
            scale = tl.where(beyond, scale_of(VAR, W, after, eps)[:, None], scale)
            mean = tl.where(beyond, tl.load(MEAN + after).to(tl.float32)[:, None], mean)
        x = (x - mean) * scale
    if B is not None:
        b = tl.load(B + channel).to(tl.float32)[:, None]
        if split:
            b = tl.where(beyond, tl.load(B + after).to(tl.float32)[:, None], b)
        x += b
    tl.store(Y + base + offset, activated(x, ACT), keep)


@triton.jit
def scale_of(VAR, W, channel, eps):
    """weight / sqrt(var + eps) of channels."""
    scale = tl.rsqrt(tl.load(VAR + channel).to(tl.float32) + tl.cast(eps, tl.float32))
    if W is not None:
        scale *= tl.load(W + channel).to(tl.float32)
    return scale
