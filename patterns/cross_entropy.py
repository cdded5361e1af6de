"""Cross entropy over rows of logits: the negative log of the target's softmax.

logits is `[..., v]` in fp32, bf16 or fp16, target int64 with as many elements as there are rows;
rows whose target is ignore_index do not count; any other target outside [0, v) is an assertion, as
in torch. weight, `[v]`, is what the loss of each class is multiplied with, and may be missing; a
mean divides by the weights of the targets. smoothing mixes the target with the uniform
distribution. With upcast "fp32" the logits are cast first, and the loss is fp32. The sums are in
fp32; the logarithm of each row's sum and its target's logit are kept for the backward, `[2, rows]`.
Source: torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.loss.cross_entropy import forward, reject_target, reject_weight, valid

FEW = 1 << 22  # logits: 8 MB in bf16, which an H200 reads and writes in 4 microseconds


@Pattern
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float,
    reduction: Literal["mean", "sum", "none"],
    upcast: Literal["fp32", "none"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.float() if upcast == "fp32" else logits
    # torch has no gradient of class weights
    weight = weight if weight is None else weight.detach().to(logits.dtype)
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=smoothing,
        reduction=reduction,
    )  # fmt: skip


@cross_entropy.near_miss
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    """of probabilities"""
    return F.nll_loss(logits.softmax(-1), target, ignore_index=ignore_index, reduction=reduction)


@cross_entropy.near_miss
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    """with classes in another dimension"""
    return F.cross_entropy(
        logits[None, :, :].mT, target[None], ignore_index=ignore_index, reduction=reduction
    )


@cross_entropy.guard
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    if dynamic(logits.shape[-1]):
        return Reject("the number of classes is dynamic")
    if dynamic(logits.stride(-1)) or logits.stride(-1) != 1:
        return Reject(f"the logits of a row are {logits.stride(-1)} apart")
    return (
        reject_target(target)
        or reject_weight(logits, weight)
        or reject_dtypes(logits=logits)
        or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)
    )


@cross_entropy.worthwhile
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast, training):
    small = statically_known_true(logits.numel() < 1 << 26)
    if weight is not None or small or number(logits.shape[-1]) < 16384:
        return UNMEASURED


@cross_entropy.kernel(saves=("rows",))
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast, save):
    dtype = torch.float32 if upcast == "fp32" else logits.dtype
    counts = valid(target, ignore_index, logits.shape[-1])
    losses, rows = forward(logits, target, ignore_index, smoothing, weight=weight)
    if reduction == "none":
        return losses.to(dtype), rows
    total = losses.sum()
    counts = counts if weight is None else of_targets(weight, target, counts)
    return (total if reduction == "sum" else total / counts.sum()).to(dtype), rows


def of_targets(weight: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """The weight of each row, 0 where it does not count."""
    return torch.where(counts, weight[torch.where(counts, target, 0)].float(), 0.0)


@cross_entropy.saved
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    rows, counts = logits.reshape(-1, logits.shape[-1]).float(), target != ignore_index
    label = rows.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
    lse = torch.logsumexp(rows, 1)
    lse = torch.where(lse == math.inf, math.nan, lse)  # as the gradient of such a row is
    return torch.stack([torch.where(counts, lse, math.inf), label])


@cross_entropy.backward(plain=True)
def _(saved, dloss):
    """Of a row that counts (softmax - (1 - smoothing) onehot - smoothing / v) · scale, else 0. In
    plain torch: Inductor writes it over the logits where nobody else needs them. Where there are
    many logits, target and scale are left to a scatter afterwards: read for every logit, they would
    take longer than the logits. Where there are few, one launch more would take the host longer.
    """
    logits = saved.logits.reshape(-1, saved.logits.shape[-1])
    lse, label = saved.rows[:, :, None]
    uniform, onehot = saved.smoothing / logits.shape[-1], 1.0 - saved.smoothing
    # which rows count is read from what is kept: a mask would be one more tensor to keep
    scale, counts = dloss.float(), lse != math.inf
    target = torch.where(counts, saved.target[:, None], 0)
    p, p_target = torch.exp(logits.float() - lse), torch.exp(label - lse)
    uniform_target = uniform
    if saved.weight is not None:
        onehot, uniform = onehot * saved.weight[target].float(), uniform * saved.weight.float()
        uniform_target = uniform[target]
        times = onehot + uniform.sum() if saved.smoothing else onehot
        p, p_target = p * times, p_target * times
    if saved.reduction == "mean":
        # With no row that counts, the loss is NaN and the gradient 0. The sum is the forward's,
        # operator for operator: it is kept, and no kernel adds it up again.
        among = saved.target != saved.ignore_index
        if saved.weight is None:
            scale = scale / among.sum().clamp(min=1)
        else:
            total = of_targets(saved.weight, saved.target, among).sum()
            scale = scale / torch.where(among.any(), total, 1.0)
    if saved.reduction == "none":
        scale = torch.where(counts, scale[:, None], 0.0)
    if statically_known_true(logits.numel() < FEW):
        classes = torch.arange(logits.shape[-1], device=logits.device)
        d = p - uniform - torch.where(classes == target, onehot, 0.0)
        d = torch.where(counts, d * scale, 0.0).to(logits.dtype)
    else:
        if saved.smoothing:
            p = torch.where(counts, p - uniform, p)
        at = torch.where(counts, (p_target - uniform_target - onehot) * scale, 0.0)
        d = (p * scale).to(logits.dtype).scatter(1, target, at.to(logits.dtype))
    return d.view(saved.logits.shape), None, None


@cross_entropy.inputs(dict(rows=7, v=100), dict(rows=8192, v=32000))
def _(tensor, rows, v, weighted=1):  # a benchmark that is not weighted drops the weights
    return tensor(rows, v), (tensor(rows) > 0).long(), tensor(v).abs(), -100, 0.1, "mean", "none"
