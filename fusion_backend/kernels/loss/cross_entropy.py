"""Cross entropy of rows of logits, and its gradient in their place.

loss = lse - logit of the target, with lse = log Σ e^logit; with smoothing s: (1 - s) loss + s (lse
- mean of the logits). gradient = (softmax - (1 - s) onehot - s / v) · scale. Both 0 where the
target is ignore_index. With class weights w the loss is that of the target times its weight, and
with smoothing (1 - s) w_t loss + s / v Σ w (lse - logit). Sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import (
    as_rows,
    dense,
    dynamic,
    memory,
    number,
    reject_dtypes,
    same_sizes,
)
from fusion_backend.kernels.common.launch import assert_all, launch
from fusion_backend.reporting.reject import Reject


def reject_target(target: Tensor) -> Reject | None:
    """Refuse targets that are not a dense vector of class numbers."""
    if target.dim() != 1 or dynamic(target.stride(0)) or target.stride(0) != 1:
        return Reject(f"target has shape {tuple(target.shape)} and strides {target.stride()}")


def reject_weight(logits: Tensor, weight: Tensor | None) -> Reject | None:
    """Refuse class weights that are not a dense vector of one number a class."""
    if weight is None:
        return None
    if not same_sizes(weight.shape, logits.shape[-1:]) or not dense(weight, range(weight.dim())):
        return Reject(f"weight is not a dense vector of one number a class: {memory(weight)}")
    return reject_dtypes(weight=weight)


def valid(target, ignore_index, classes):
    """Which rows count. A label that is no class is an assertion on the device, as in torch."""
    counts = target != ignore_index
    inside = (target >= 0) & (target < classes)
    assert_all(inside | ~counts, "cross_entropy: a target is out of bounds")
    return counts


def sums_config(v: int, warps: int) -> tuple[int, int, int]:
    """Lanes, logits a lane and warps for the sums: 8 neighbours a thread, up to 8 times (swept on
    an H200).
    """
    size = min(triton.next_power_of_2(v), 16384)
    lanes = min(size, 256 * warps)
    return lanes, size // lanes, warps


def config(v: int, block: int, warps: int, stages: int) -> dict:
    block = min(block, triton.next_power_of_2(v))
    return dict(BLOCK=block, num_warps=min(warps, max(4, block // 512)), STAGES=stages)


def forward(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float,
    how: tuple[int, int, int] | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of each row the loss, `[rows]`, and what the gradient reads, `[2, rows]`: the logarithm of
    the sum of its exponentials (infinity if its target is ignored), and the target's logit. In
    fp32.

    logits is `[..., v]` in fp32, bf16 or fp16, its columns one element apart (else it is copied);
    target `[rows]` int64, contiguous; weight `[v]`, contiguous. Grid: rows.
    """
    v = number(logits.shape[-1])
    lanes, each, warps = how or sums_config(v, 4 if v <= 4096 else 8)
    x, rows, stride = as_rows(logits)
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    kept = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    launch(
        cross_entropy_kernel, (rows,), x, target, weight, losses, kept, ignore_index, smoothing,
        STRIDE=stride, V=v, LANES=lanes, LOGITS=each, SMOOTH=smoothing != 0.0, num_warps=warps,
    )  # fmt: skip
    return losses, kept


def gradient_in_place(
    logits: Tensor, target: Tensor, scale: Tensor, ignore_index: int, smoothing: float,
    how: tuple[int, int, int] = (8192, 16, 1),
) -> Tensor:  # fmt: skip
    """The loss `[rows]` in fp32 of contiguous logits `[rows, v]`, which become their gradient.

    logits in fp32, bf16 or fp16; target `[rows]` int64, contiguous; scale in fp32, one number or
    `[rows]`: what the gradient is multiplied with. Grid: rows.
    """
    rows, v = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sizes = config(number(v), *how)
    lanes, each, _ = sums_config(number(v), sizes["num_warps"])
    launch(
        cross_entropy_in_place_kernel, (rows,),
        logits, target, scale, losses, ignore_index, smoothing,
        EACH=scale.dim() > 0, V=number(v), LANES=lanes, LOGITS=each, SMOOTH=smoothing != 0.0,
        **sizes,
    )  # fmt: skip
    return losses


# Bound by its instructions: each lane takes several logits for one new largest value.
@triton.jit
def sums_of_row(
    X, W, V: tl.constexpr, LANES: tl.constexpr, LOGITS: tl.constexpr, SMOOTH: tl.constexpr
):
    """The largest logit of a row (0 for -inf), the sum of the e^(x - that), and where they are
    asked for, those of the row, times its weights if there are, and of the weights.
    """
    col = tl.arange(0, LOGITS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # the largest logit of each lane, and its sum of e^(x - top)
    tops = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    weights = tl.zeros([LANES], tl.float32)
    WHOLE: tl.constexpr = V // (LOGITS * LANES) * (LOGITS * LANES)
    for start in tl.range(0, WHOLE, LOGITS * LANES):
        x = tl.load(X + start + col).to(tl.float32)
        tops, sums = accumulate(x, tops, sums)
        if SMOOTH:
            if W is not None:
                w = tl.load(W + start + col).to(tl.float32)
                x *= w
                weights += tl.sum(w, 0)
            plain += tl.sum(x, 0)
    if WHOLE < V:
        keep = WHOLE + col < V
        x = tl.load(X + WHOLE + col, keep, float("-inf")).to(tl.float32)
        tops, sums = accumulate(x, tops, sums)
        if SMOOTH:
            if W is not None:
                w = tl.load(W + WHOLE + col, keep, 0.0).to(tl.float32)
                x *= w
                weights += tl.sum(w, 0)
            plain += tl.sum(tl.where(keep, x, 0.0), 0)
    top = tl.max(tops)
    shift = tl.where(top == float("-inf"), 0.0, top)
    sum = tl.sum(sums * tl.exp2((tops - shift) * 1.4426950408889634))
    return shift, sum, tl.sum(plain), tl.sum(weights)


@triton.jit
def accumulate(x, tops, sums):
    """The largest value of each lane and its sum of e^(x - top), with the rows of x `[LOGITS,
    LANES]`.
    """
    top = tl.maximum(tops, tl.max(x, 0))
    shift = tl.where(top == float("-inf"), 0.0, top) * 1.4426950408889634
    e = tl.exp2(x * 1.4426950408889634 - shift[None, :])
    return top, sums * tl.exp2(tops * 1.4426950408889634 - shift) + tl.sum(e, 0)


@triton.jit
def loss_of_row(
    top, sum, label, plain, smoothing, weight, weights, V: tl.constexpr, SMOOTH: tl.constexpr
):
    smooth = tl.cast(smoothing, tl.float32)
    if weight is None:
        loss = (1.0 - smooth) * (top - label) + tl.log(sum)
        if SMOOTH:
            loss += smooth * (top - plain / V)
    else:
        log = tl.log(sum)
        loss = (1.0 - smooth) * weight * (log + (top - label))
        if SMOOTH:
            loss += smooth / V * (weights * (log + top) - plain)
    return loss


@triton.jit
def gradient_of_row(
    X, D, top, inverse, target, scale, ignore_index, smoothing,
    V: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The softmax is e^(x - top) · inverse: exact where it is large, if top is the
    largest logit.
    """
    lane = tl.arange(0, BLOCK)
    smooth = tl.cast(smoothing, tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        col = start + lane
        x = tl.load(X + col, col < V, 0.0).to(tl.float32)
        d = tl.exp2((x - top) * 1.4426950408889634) * inverse - smooth / V
        d -= tl.where(col == target, 1.0 - smooth, 0.0)
        tl.store(D + col, tl.where(target == ignore_index, 0.0, d * scale), col < V)


# Bytes: logits once.
@triton.jit
def cross_entropy_kernel(
    X, TARGET, W, LOSS, KEPT, ignore_index, smoothing,
    STRIDE: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr, LOGITS: tl.constexpr,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * STRIDE
    top, sum, plain, weights = sums_of_row(X, W, V, LANES, LOGITS, SMOOTH)
    target = tl.load(TARGET + row)
    inside = (target >= 0) & (target < V)
    label = tl.load(X + target, inside, 0.0).to(tl.float32)
    weight = None if W is None else tl.load(W + target, inside, 0.0).to(tl.float32)
    loss = loss_of_row(top, sum, label, plain, smoothing, weight, weights, V, SMOOTH)
    tl.store(LOSS + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(KEPT + row, tl.where(target == ignore_index, float("inf"), tl.log(sum) + top))
    tl.store(KEPT + tl.num_programs(0) + row, label)


# Bytes: logits once, their gradient once; the second reading of a row comes from L2.
@triton.jit
def cross_entropy_in_place_kernel(
    X, TARGET, SCALE, LOSS, ignore_index, smoothing,
    EACH: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    LANES: tl.constexpr, LOGITS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * V
    # The target's logit is read before the sums: their barrier stands between all readers and the
    # first writer.
    target = tl.load(TARGET + row)
    label = tl.load(X + target, (target >= 0) & (target < V), 0.0).to(tl.float32)
    top, sum, plain, weights = sums_of_row(X, None, V, LANES, LOGITS, SMOOTH)
    loss = loss_of_row(top, sum, label, plain, smoothing, None, weights, V, SMOOTH)
    tl.store(LOSS + row, tl.where(target == ignore_index, 0.0, loss))
    scale = tl.load(SCALE + (row if EACH else 0))
    gradient_of_row(X, X, top, 1.0 / sum, target, scale, ignore_index, smoothing, V, BLOCK, STAGES)
