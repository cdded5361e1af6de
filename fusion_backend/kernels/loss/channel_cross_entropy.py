"""Cross entropy over dimension 1 of logits `[n, c, ...]`, dense, and its gradient.

With class weights w (1 without them), target t and smoothing s, the loss of a position is
(1 - s) w_t (lse - x_t) + s / c Σ w (lse - x), with lse = log Σ e^x, and 0 where the target is
ignore_index. A mean divides by the sum of the w_t. A program walks through the channels of its
positions, which are adjacent in memory: a thread has the sums of its own positions. In fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.channel_tiles import planes, positions, tiles_of
from fusion_backend.kernels.common.inputs import dense, memory, number, same_sizes
from fusion_backend.kernels.common.launch import assert_all, launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.reporting.reject import Reject

MULTIPROCESSORS = 132  # of an H200


class Loss(NamedTuple):
    """The options of the loss; weight is `[c]`, contiguous, or None."""

    weight: Tensor | None
    ignore_index: int
    smoothing: float


def reject_target_and_weight(
    logits: Tensor, target: Tensor, weight: Tensor | None
) -> Reject | None:
    """Refuse targets that are not a dense class number for each position, and weights that are not
    a dense vector.
    """
    if not same_sizes(target.shape, (logits.shape[0], *logits.shape[2:])):
        return Reject(f"target with shape {tuple(target.shape)} is not one class for each position")
    if not dense(target, range(target.dim())):
        return Reject(f"target is not dense: {memory(target)}")
    if weight is not None and not dense(weight, range(weight.dim())):
        return Reject(f"weight is not dense: {memory(weight)}")


class Steps(NamedTuple):
    """What a program takes: positions, channels at a time, its warps, and the stages of its loop
    over channels.
    """

    positions: int
    channels: int
    warps: int
    stages: int


def forward_steps(x: Tensor) -> Steps:
    """8 positions a thread, and 20 channels of each on their way from memory. There are fewer
    positions where not every multiprocessor would have a program.
    """
    size = 256
    while size > 64 and statically_known_true(tiles_of(x, size) < MULTIPROCESSORS):
        size //= 2
    return Steps(size, min(4, triton.next_power_of_2(number(x.shape[1]))), 1, 5)


def backward_steps(x: Tensor) -> Steps:
    """Nothing is added up: more channels at a time, and no stages."""
    c, size = number(x.shape[1]), forward_steps(x).positions
    channels, warps = (16, 2) if c >= 32 else (min(8, triton.next_power_of_2(c)), 1)
    return Steps(size, channels, warps, 0)


def forward(
    logits: Tensor, target: Tensor, loss: Loss, each: bool, save: bool, how: Steps | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses in fp32, of `each` position in target's shape, or their sum; the sum of the
    weights of the targets; and what the gradient reads, empty unless `save`: the largest logit of
    each position and log Σ e^(x - that), `[2, n, ...]` in fp32. Their sum would be rounded, which
    is worse than eager for large logits.

    logits is `[n, c, ...]`, contiguous, in fp32, bf16 or fp16, c up to MAX_CHANNELS; target int64.
    A target that is no class is an assertion on the device, as in torch. Grid: programs of
    how.positions.
    """
    how = how or forward_steps(logits)
    programs = tiles_of(logits, how.positions)
    empty = dict(dtype=torch.float32, device=logits.device)
    losses = torch.empty(target.shape, **empty) if each else None
    kept = flat((2 * save, *target.shape), **empty)
    sums = torch.empty(3, programs, **empty)
    launch(
        channel_cross_entropy_kernel, (programs,),
        logits, target, loss.weight, losses, kept if save else None, sums, logits.shape[0],
        loss.ignore_index, loss.smoothing, **constants(logits, loss, how),
    )  # fmt: skip
    total, weights, outside = (part.sum() for part in sums)
    assert_all(outside == 0, "channel_cross_entropy: a target is out of bounds")
    kept = shaped(kept, (2, *target.shape)) if save else kept
    return losses if each else total, weights, kept


def backward(
    logits: Tensor, target: Tensor, kept: Tensor, scale: Tensor, loss: Loss,
    how: Steps | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, in their shape and dtype, contiguous.

    scale, in fp32, is what the loss of each position is multiplied with: one number, or as many as
    there are targets. The rest as in the forward. Grid: programs of how.positions.
    """
    dx = flat(logits.shape, logits.dtype, logits.device)
    how = how or backward_steps(logits)
    launch(
        channel_cross_entropy_backward_kernel, (tiles_of(logits, how.positions),),
        logits, target, loss.weight, kept, scale.contiguous(), dx, logits.shape[0],
        loss.ignore_index, loss.smoothing, EACH=scale.dim() > 0,
        **constants(logits, loss, how),
    )  # fmt: skip
    return shaped(dx, logits.shape)


def constants(x: Tensor, loss: Loss, how: Steps) -> dict:
    return dict(
        C=number(x.shape[1]), INNER=planes(x), SMOOTH=loss.smoothing != 0.0,
        CHANNELS=how.channels, BLOCK=how.positions, STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip


@triton.jit
def targets_of(TARGET, W, position, there, ignore_index, C: tl.constexpr):
    """Of each position its class, -1 where that is none; whether it counts; and its weight."""
    target = tl.load(TARGET + position, there, 0)
    counts = there & (target != ignore_index)
    target = tl.where((target >= 0) & (target < C), target, -1).to(tl.int32)
    if W is None:
        weight = tl.where(counts, 1.0, 0.0)
    else:
        weight = tl.load(W + target, counts & (target >= 0), 0.0).to(tl.float32)
    return target, counts, weight


@triton.jit
def weights_of(W, ch, C: tl.constexpr):
    """The weights of these classes, 0 behind the last."""
    if W is None:
        return tl.where(ch < C, 1.0, 0.0)
    else:
        return tl.load(W + ch, ch < C, 0.0).to(tl.float32)


# Bytes: logits and targets once, 8 a position for what is kept.
@triton.jit
def channel_cross_entropy_kernel(
    X, TARGET, W, LOSS, KEPT, SUMS, samples, ignore_index, smoothing,
    C: tl.constexpr, INNER: tl.constexpr, SMOOTH: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    first, across, there = positions(program, samples, C, INNER, BLOCK)
    position = tl.cast(program, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target, counts, weight = targets_of(TARGET, W, position, there, ignore_index, C)
    tl.store(SUMS + programs + program, tl.sum(weight))
    tl.store(SUMS + 2 * programs + program, tl.sum(tl.where(counts & (target < 0), 1.0, 0.0)))
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    label = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)  # Σ w (x - top)
    all_weights = 0.0  # Σ w
    for start in tl.range(0, C, CHANNELS, num_stages=STAGES):
        ch = start + tl.arange(0, CHANNELS)[:, None]
        keep = (ch < C) & there[None, :]
        x = tl.load(X + first + ch * INNER + across[None, :], keep, float("-inf")).to(tl.float32)
        label += tl.sum(tl.where(ch == target[None, :], x, 0.0), 0)
        before, top = top, tl.maximum(top, tl.max(x, 0))
        x -= finite(top)[None, :]  # before it is multiplied: large numbers that differ little
        e = tl.exp2(x * 1.4426950408889634)
        sums *= tl.exp2((before - finite(top)) * 1.4426950408889634)
        sums += tl.sum(e, 0)
        if SMOOTH:
            w = weights_of(W, ch, C)
            weighted += (finite(before) - finite(top)) * all_weights
            weighted += tl.sum(tl.where(keep, w * x, 0.0), 0)
            all_weights += tl.sum(w)
    log = tl.log(sums)
    loss = weight * (log + (top - label))
    if SMOOTH:
        smooth = tl.cast(smoothing, tl.float32)
        loss = (1.0 - smooth) * loss + smooth / C * (all_weights * log - weighted)
    loss = tl.where(counts, loss, 0.0)
    if KEPT is not None:
        tl.store(KEPT + position, top, there)
        tl.store(KEPT + tl.cast(samples, tl.int64) * INNER + position, log, there)
    if LOSS is not None:
        tl.store(LOSS + position, loss, there)
    tl.store(SUMS + program, tl.sum(loss))


@triton.jit
def finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


# Bytes: logits and targets once, the gradient once, 8 a position of what was kept.
@triton.jit
def channel_cross_entropy_backward_kernel(
    X, TARGET, W, KEPT, SCALE, DX, samples, ignore_index, smoothing,
    EACH: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr, SMOOTH: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, across, there = positions(tl.program_id(0), samples, C, INNER, BLOCK)
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target, counts, weight = targets_of(TARGET, W, position, there, ignore_index, C)
    top = tl.load(KEPT + position, there, 0.0)[None, :]
    log = tl.load(KEPT + tl.cast(samples, tl.int64) * INNER + position, there, 0.0)[None, :]
    scale = tl.load(SCALE + position, there, 0.0) if EACH else tl.load(SCALE)
    all_weights = 0.0
    if SMOOTH:
        smooth = tl.cast(smoothing, tl.float32)
        weight *= 1.0 - smooth
        for start in tl.range(0, C, CHANNELS):
            all_weights += tl.sum(weights_of(W, start + tl.arange(0, CHANNELS), C))
    for start in tl.range(0, C, CHANNELS, num_stages=STAGES):
        ch = start + tl.arange(0, CHANNELS)[:, None]
        at = ch * INNER + across[None, :]
        keep = (ch < C) & there[None, :]
        x = tl.load(X + first + at, keep, float("-inf")).to(tl.float32)
        softmax = tl.exp2((x - top - log) * 1.4426950408889634)
        onehot = tl.where(ch == target[None, :], 1.0, 0.0)
        d = (softmax - onehot) * weight[None, :]
        if SMOOTH:
            d += smooth / C * (softmax * all_weights - weights_of(W, ch, C))
        tl.store(DX + first + at, tl.where(counts[None, :], d * scale, 0.0), keep)
