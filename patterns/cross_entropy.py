"""Cross entropy over rows of logits: the negative log of the target's softmax.

logits is `[..., v]` in fp32, bf16 or fp16, target int64 with as many elements as there are rows; rows whose target is
ignore_index do not count; any other target outside [0, v) is an assertion, as in torch. smoothing mixes the target with
the uniform distribution. With upcast "fp32" the logits are cast first, and the loss is fp32. The sums are in fp32; only
the logarithm of each row's sum is kept for the backward. Source: torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch
from fusion_backend.kernels.inputs import as_rows, assert_all, dynamic, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.rows import UNMEASURED


@Pattern
def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, reduction: Literal["mean", "sum", "none"],
    upcast: Literal["fp32", "none"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.float() if upcast == "fp32" else logits
    return F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction)


@cross_entropy.near_miss
def _(logits, target, ignore_index, smoothing, reduction, upcast):
    """of probabilities"""
    return F.nll_loss(logits.softmax(-1), target, ignore_index=ignore_index, reduction=reduction)


@cross_entropy.near_miss
def _(logits, target, ignore_index, smoothing, reduction, upcast):
    """with classes in another dimension"""
    return F.cross_entropy(logits[None, :, :].mT, target[None], ignore_index=ignore_index, reduction=reduction)


@cross_entropy.guard
def _(logits, target, ignore_index, smoothing, reduction, upcast):
    if dynamic(logits.shape[-1]):
        return Reject("the number of classes is dynamic")
    if dynamic(logits.stride(-1)) or logits.stride(-1) != 1:
        return Reject(f"the logits of a row are {logits.stride(-1)} apart")
    if target.dim() != 1 or dynamic(target.stride(0)) or target.stride(0) != 1:
        return Reject(f"target has shape {tuple(target.shape)} and strides {target.stride()}")
    return reject_dtypes(logits=logits) or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)


def valid(target, ignore_index, classes):
    """Which rows count. A label that is no class is an assertion on the device, as in torch."""
    counts = target != ignore_index
    inside = (target >= 0) & (target < classes)
    assert_all(inside | ~counts, "cross_entropy: a target is out of bounds")
    return counts


@cross_entropy.worthwhile
def _(logits, target, ignore_index, smoothing, reduction, upcast, training):
    if not training or statically_known_true(logits.numel() < 1 << 26) or number(logits.shape[-1]) < 16384:
        return UNMEASURED


@cross_entropy.kernel(saves=("lse",))
def _(logits, target, ignore_index, smoothing, reduction, upcast, save):
    dtype = torch.float32 if upcast == "fp32" else logits.dtype
    counts = valid(target, ignore_index, logits.shape[-1])
    losses, lse = forward(logits, target, ignore_index, smoothing)
    if reduction == "none":
        return losses.to(dtype), lse
    total = losses.sum()
    return (total if reduction == "sum" else total / counts.sum()).to(dtype), lse


def forward(logits, target, ignore_index, smoothing, how=None):
    """The loss of each row and the logarithm of the sum of its exponentials, in fp32. Grid: rows."""
    v = number(logits.shape[-1])
    block, each, warps = how or forward_config(v)
    x, rows, stride = as_rows(logits)
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    launch(
        cross_entropy_kernel, (rows,), x, target, losses, lse, ignore_index, smoothing, STRIDE=stride, V=v,
        BLOCK=block, EACH=each, SMOOTH=smoothing != 0.0, num_warps=warps,
    )  # fmt: skip
    return losses, lse


def forward_config(v: int) -> tuple[int, int, int]:
    """BLOCK, logits a lane and warps: 8 neighbours a thread, up to 8 times (swept on an H200)."""
    size = min(triton.next_power_of_2(v), 16384)
    warps = 4 if size < 8192 else 8
    block = min(size, 256 * warps)
    return block, size // block, warps


@cross_entropy.saved
def _(logits, target, ignore_index, smoothing, reduction, upcast):
    return torch.logsumexp(logits.reshape(-1, logits.shape[-1]).float(), 1)


@cross_entropy.backward
def _(saved, dloss):
    scale = dloss.float().contiguous()
    if saved.reduction == "mean":
        scale = scale / (saved.target != saved.ignore_index).sum()
    return gradient(saved.logits, saved.target, saved.lse, scale, saved.ignore_index, saved.smoothing), None


def gradient(logits, target, lse, scale, ignore_index, smoothing, how=(8192, 16, 1)):
    """That of the logits, where each row's loss has the gradient `scale` (one number, or one a row). Grid: rows."""
    v = number(logits.shape[-1])
    block = min(how[0], triton.next_power_of_2(v))
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x, rows, stride = as_rows(logits)
    launch(
        cross_entropy_backward_kernel, (rows,), x, target, lse, scale, d, ignore_index, smoothing, EACH=scale.dim() > 0,
        STRIDE=stride, V=v, BLOCK=block, STAGES=how[2], num_warps=min(how[1], max(4, block // 512)),
    )  # fmt: skip
    return d


# Bytes: logits once. The loop is bound by its instructions: each lane takes EACH logits for one new largest value.
@triton.jit
def cross_entropy_kernel(
    X, TARGET, LOSS, LSE, ignore_index, smoothing, STRIDE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * STRIDE
    col = tl.arange(0, EACH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tops = tl.full([BLOCK], float("-inf"), tl.float32)  # the largest logit of each lane, and its sum of e^(x - top)
    sums = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    WHOLE: tl.constexpr = V // (EACH * BLOCK) * (EACH * BLOCK)
    for start in tl.range(0, WHOLE, EACH * BLOCK):
        x = tl.load(X + start + col).to(tl.float32)
        tops, sums = taken_in(x, tops, sums)
        if SMOOTH:
            plain += tl.sum(x, 0)
    if WHOLE < V:
        keep = WHOLE + col < V
        x = tl.load(X + WHOLE + col, keep, float("-inf")).to(tl.float32)
        tops, sums = taken_in(x, tops, sums)
        if SMOOTH:
            plain += tl.sum(tl.where(keep, x, 0.0), 0)
    top = tl.max(tops)
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.log(tl.sum(sums * tl.exp2((tops - shift) * 1.4426950408889634))) + shift
    target = tl.load(TARGET + row)
    inside = (target >= 0) & (target < V)
    smooth = tl.cast(smoothing, tl.float32)
    loss = (1.0 - smooth) * (lse - tl.load(X + target, inside, 0.0).to(tl.float32))
    if SMOOTH:
        loss += smooth * (lse - tl.sum(plain) / V)
    tl.store(LOSS + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(LSE + row, lse)


@triton.jit
def taken_in(x, tops, sums):
    """The largest value of each lane and its sum of e^(x - top), with the rows of x `[EACH, BLOCK]`."""
    top = tl.maximum(tops, tl.max(x, 0))
    shift = tl.where(top == float("-inf"), 0.0, top) * 1.4426950408889634
    e = tl.exp2(x * 1.4426950408889634 - shift[None, :])
    return top, sums * tl.exp2(tops * 1.4426950408889634 - shift) + tl.sum(e, 0)


# Bytes: logits once, their gradient once.
@triton.jit
def cross_entropy_backward_kernel(
    X, TARGET, LSE, SCALE, D, ignore_index, smoothing, EACH: tl.constexpr, STRIDE: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    target = tl.load(TARGET + row)
    lse = tl.load(LSE + row)
    smooth = tl.cast(smoothing, tl.float32)
    scale = tl.load(SCALE + (row if EACH else 0))
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        col = start + lane
        x = tl.load(X + row * STRIDE + col, col < V, 0.0).to(tl.float32)
        d = tl.exp2((x - lse) * 1.4426950408889634) - smooth / V - tl.where(col == target, 1.0 - smooth, 0.0)
        tl.store(D + row * V + col, tl.where(target == ignore_index, 0.0, d * scale), col < V)


@cross_entropy.inputs(dict(rows=7, v=100), dict(rows=8192, v=32000))
def _(tensor, rows, v):
    return tensor(rows, v), (tensor(rows) > 0).long(), -100, 0.1, "mean", "none"
