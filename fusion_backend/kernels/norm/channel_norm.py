"""Normalisation over dimension 1 of `[n, c, ...]`, dense: y = u · weight + bias. In a layer norm u
is (x - mean) / sqrt(var + eps), in an RMS norm x / sqrt(mean(x²) + eps); with "length" it is
scale · x / max(‖x‖, eps).

A program takes all channels of some positions (common/channel_tiles.py). All sums are in fp32.
channel_norm_backward.py has the gradients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.channel_tiles import Tile, planes, tile, tiles_of
from fusion_backend.kernels.common.inputs import dense, memory, number, same_sizes
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.norm.group_norm import affine
from fusion_backend.reporting.reject import Reject

Kind = Literal["layer", "rms", "length"]


class ChannelNorm(NamedTuple):
    """What is computed: weight and bias, one element for each channel and contiguous, or None; of
    unit length the number that it is multiplied by.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    norm: Kind
    scale: float | None = None


def channels_of_rows(x: Tensor) -> Tensor | None:
    """x `[n, t, c]` as `[n, c, t]` if that is dense: its rows are the channels of a signal, as
    behind a transposed convolution. None of other tensors, and of images, whose convolutions
    Inductor may lay out otherwise than the graph says.
    """
    if x.dim() != 3 or statically_known_true(x.stride(-1) == 1):
        return None
    first = x.transpose(1, 2)
    return first if dense(first, range(3)) else None


def reject_per_channel(x: Tensor, **vectors: Tensor | None) -> Reject | None:
    """Refuse weights and biases that do not broadcast to x with one element for each channel, or
    whose elements are not adjacent; None passes.
    """
    shape = (x.shape[1], *(1,) * (x.dim() - 2))
    for name, t in vectors.items():
        if t is None:
            continue
        if not same_sizes(t.shape, shape) and not same_sizes(t.shape, (1, *shape)):
            return Reject(
                f"{name} with shape {tuple(t.shape)} is not one number for each of the "
                f"{x.shape[1]} channels of x"
            )
        if not dense(t, range(t.dim())):
            return Reject(f"{name} is not dense: {memory(t)}")


def forward_tile(c: int) -> Tile:
    """32 elements a thread; 16 positions at least, so that each reading is of 32 bytes."""
    channels = triton.next_power_of_2(c)
    positions = max(16, min(1024, 8192 // channels))
    return Tile(channels, positions, max(4, channels * positions // 1024))


def forward(x: Tensor, norm: ChannelNorm, how: Tile | None = None) -> Tensor:
    """y in x's shape and dtype, contiguous.

    x is `[n, c, ...]`, contiguous, in fp32, bf16 or fp16; c up to MAX_CHANNELS. Weight and bias are
    of x's dtype. Grid: tiles of how.positions.
    """
    y, c, inner = flat(x.shape, x.dtype, x.device), number(x.shape[1]), planes(x)
    how = how or forward_tile(c)
    tiles = tiles_of(x, how.positions)
    launch(
        channel_norm_kernel, (tiles,), x, norm.weight, norm.bias, y, x.shape[0], norm.eps,
        1.0 if norm.scale is None else norm.scale, C=c, INNER=inner, NORM=norm.norm,
        CHANNELS=how.channels, BLOCK=how.positions, num_warps=how.warps,
    )  # fmt: skip
    return shaped(y, x.shape)


# Bytes: x once, y once.
@triton.jit
def channel_norm_kernel(
    X, W, B, Y, samples, eps, scale, C: tl.constexpr, INNER: tl.constexpr, NORM: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ch, first, at, keep = tile(tl.program_id(0), samples, C, INNER, CHANNELS, BLOCK)
    x = tl.load(X + first + at, keep, 0.0).to(tl.float32)
    x, factor, _ = factor_of(x, ch, eps, C, NORM)
    if NORM == "length":
        factor *= tl.cast(scale, tl.float32)
    tl.store(Y + first + at, affine(x * factor, W, B, ch, ch < C), keep)


@triton.jit
def factor_of(x, ch, eps, C: tl.constexpr, NORM: tl.constexpr):
    """x, centred in a layer norm; its factor at each position, `[1, positions]`; and the sum of
    (x · factor)² as the gradient has it: infinite where eps was longer than x.
    """
    if NORM == "layer":
        mean = tl.sum(x, 0, keep_dims=True) / C
        x = tl.where((ch < C)[:, None], x - mean, 0.0)
    squares, eps = tl.sum(x * x, 0, keep_dims=True), tl.cast(eps, tl.float32)
    if NORM == "length":
        length = tl.sqrt(squares)
        shorter = length < eps  # not so of NaN, which stays
        factor = 1.0 / tl.where(shorter, eps, length)
        total = tl.where(shorter, float("inf"), 1.0)
    else:
        factor = tl.rsqrt(squares / C + eps)
        total = C
    return x, factor, total
