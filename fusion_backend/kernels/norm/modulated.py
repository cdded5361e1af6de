"""Layer or RMS normalisation of rows, modulated by a scale and a shift for each sample.

forward: c = x - mean(x), or x itself where `centred` is false; rstd = 1 / sqrt(mean(c²) + eps);
y = (c · rstd · weight + bias) · (1 + scale) + shift. All sums are in fp32. modulated_backward.py
has the gradients.

x `[b, ..., n]` is b samples of tokens, scale and shift are a row for each sample. A program has
tokens of one sample, whose scale and shift it reads once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config, multiprocessors
from fusion_backend.kernels.common.vectors import row_vector

MAX_HELD = 8192  # elements of the longest row


class Modulation(NamedTuple):
    """What is computed: weight and bias `[n]` or None, scale `[b, 1, ..., n]` and shift like it or
    None, layer (centred) or RMS.
    """

    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor
    shift: Tensor | None
    eps: float
    centred: bool


class Tokens(NamedTuple):
    """A tensor `[b, ..., n]` as kernels walk through it: token t of sample s begins at element
    (s · gap + t) · stride.
    """

    tensor: Tensor
    gap: int
    stride: int


def sizes(x: Tensor) -> tuple:
    """Samples, tokens of each, and n, of x `[b, ..., n]`."""
    samples, *tokens, n = map(number, x.shape)
    return samples, math.prod(tokens), n


def by_tokens(x: Tensor) -> Tokens:
    """The tensor itself, wherever the distance of tokens is a number and that of samples a multiple
    of it, else a copy. A distance in tokens has 32 bits also where there are more elements.
    """
    samples, *shape, n = map(number, x.shape)
    first, *strides, column = map(number, x.stride())
    stride = strides[-1]
    even = all(
        statically_known_true(strides[i] == strides[i + 1] * shape[i + 1])
        for i in range(len(shape) - 1)
    )
    if (
        even
        and not dynamic(stride)
        and stride > 0
        and (n == 1 or statically_known_true(column == 1))
    ):
        gap = 0 if statically_known_true(samples == 1) else number(first // stride)
        if statically_known_true(samples == 1) or statically_known_true(gap * stride == first):
            return Tokens(x, gap, stride)
    return Tokens(x.contiguous(), math.prod(shape), n)


def by_samples(t: Tensor | None) -> tuple[Tensor | None, int]:
    """Scale or shift, and the distance of its rows, 0 where all samples have the same; a copy where
    columns are not one element apart. Of None it is (None, 0).
    """
    if t is None:
        return None, 0
    samples, n, distance = number(t.shape[0]), number(t.shape[-1]), number(t.stride(0))
    adjacent = n == 1 or statically_known_true(t.stride(-1) == 1)
    if statically_known_true(samples == 1) and adjacent:
        return t, 0
    if dynamic(distance) or not adjacent:
        return t.contiguous(), 0 if statically_known_true(samples == 1) else n
    return t, distance


def strips_of(samples, tokens, config: Config, device: torch.device):
    """How many programs share the tokens of a sample: as many as it has pieces of config.rows; with
    config.programs, so many a multiprocessor over all samples, but four at least, which walk
    through the pieces.
    """
    pieces = (tokens + config.rows - 1) // config.rows
    if not config.programs:
        return pieces
    programs = config.programs * multiprocessors(device)
    if dynamic(samples):
        return (programs + samples - 1) // samples
    most = max(4, programs // max(1, samples))
    return most if dynamic(tokens) else min(most, pieces)


def forward_config(n: int) -> Config:
    """8192 elements a program, 16 or 32 a thread. Of short rows 1024, by one warp (swept on an
    H200).
    """
    block = max(16, triton.next_power_of_2(n))
    if block <= 512:
        return Config(block, 1024 // block, 1)
    return Config(block, 8192 // block, 16 if block == 8192 else 8)


def forward(
    x: Tensor, modulation: Modulation, save: bool, config: Config | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y `[b, ..., n]`, contiguous and of x's dtype or `dtype`, and mean and rstd `[rows]` in fp32:
    empty unless saved, mean also if not centred.

    x is `[b, ..., n]`, its columns one element apart; weight, bias, scale and shift as in
    Modulation, each fp32, bf16 or fp16; n is up to MAX_HELD. Grid: for each sample its tokens /
    config.rows, or strips of them.
    """
    weight, bias, scale, shift, eps, centred = modulation
    samples, tokens, n = sizes(x)
    config = config or forward_config(n)
    strips = strips_of(samples, tokens, config, x.device)
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    mean, rstd = (
        torch.empty(samples * tokens if keep else 0, dtype=torch.float32, device=x.device)
        for keep in (save and centred, save)
    )
    rows, (scale, scale_stride), (shift, shift_stride) = (
        by_tokens(x), by_samples(scale), by_samples(shift),
    )  # fmt: skip
    launch(
        modulated_norm_kernel, (samples * strips,),
        rows.tensor, weight, bias, scale, shift, y,
        mean if save and centred else None, rstd if save else None,
        tokens, rows.gap, strips, eps,
        STRIDE=rows.stride, SCALE_STRIDE=scale_stride, SHIFT_STRIDE=shift_stride,
        N=n, CENTRED=centred, BLOCK=config.block, ROWS=config.rows, STAGES=config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return y, mean, rstd


# Bytes: x once, y once, 4 or 8 a row where saved; scale and shift of a program's sample from L2.
@triton.jit
def modulated_norm_kernel(
    X, W, B, SCALE, SHIFT, Y, MEAN, RSTD, tokens, gap, strips, eps,
    STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SHIFT_STRIDE: tl.constexpr,
    N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample, top = (tl.program_id(0) // strips).to(tl.int64), tl.program_id(0) % strips * ROWS
    step = strips * ROWS
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    inside = col < N
    # y = normalised · factor + rest
    factor = 1.0 + row_vector(SCALE + sample * SCALE_STRIDE, lane, N).to(tl.float32)
    rest = tl.zeros([1, BLOCK], tl.float32)
    if SHIFT is not None:
        rest += row_vector(SHIFT + sample * SHIFT_STRIDE, lane, N).to(tl.float32)
    if B is not None:
        rest += row_vector(B, lane, N).to(tl.float32) * factor
    if W is not None:
        factor *= row_vector(W, lane, N).to(tl.float32)
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(tokens - top, step), num_stages=STAGES):
        token = (top + i * step + tl.arange(0, ROWS))[:, None]
        there = token < tokens
        keep = there & inside
        h = tl.load(X + (sample * gap + token) * STRIDE + col, keep, 0.0).to(tl.float32)
        row = sample * tokens + token
        if CENTRED:
            mean = tl.sum(h, 1, keep_dims=True) / N
            h = tl.where(inside, h - mean, 0.0)
            if MEAN is not None:
                tl.store(MEAN + row, mean, there)
        rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
        tl.store(Y + row * N + col, h * rstd * factor + rest, keep)
        if RSTD is not None:
            tl.store(RSTD + row, rstd, there)
