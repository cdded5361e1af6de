"""Cross entropy over the channels of channels-first logits, dimension 1: one class for each pixel.

logits is `[n, c, ...]` with one dimension or more behind the channels, dense, in fp32, bf16 or
fp16, of up to 1024 classes; target `[n, ...]` int64. Positions whose target is ignore_index do not
count; any other target outside [0, c) is an assertion, as in torch. weight, `[c]`, is what the loss
of each class is multiplied with, and may be missing; a mean divides by the weights of the targets.
smoothing mixes the target with the uniform distribution. With upcast "fp32" the logits are cast
first, and weight and loss are fp32. The sums are in fp32; the backward keeps the largest logit and
the logarithm of the sum of each position, and the sum of the weights. Source:
torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.channel_tiles import reject_channels_first
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.loss.channel_cross_entropy import (
    Loss,
    backward,
    forward,
    reject_target_and_weight,
)


@Pattern
def channel_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float,
    reduction: Literal["mean", "sum", "none"],
    upcast: Literal["fp32", "none"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    logits = logits.float() if upcast == "fp32" else logits
    # torch has no gradient of class weights
    weight = weight if weight is None else weight.detach().to(logits.dtype)
    return F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, label_smoothing=smoothing,
        reduction=reduction,
    )  # fmt: skip


@channel_cross_entropy.near_miss
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    """of probabilities"""
    return F.nll_loss(logits.softmax(1), target, ignore_index=ignore_index, reduction=reduction)


@channel_cross_entropy.near_miss
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    """normalised over another dimension"""
    return F.nll_loss(
        torch.log_softmax(logits, 2), target, ignore_index=ignore_index, reduction=reduction
    )


@channel_cross_entropy.guard
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    return (
        reject_dtypes(logits=logits)
        or reject_channels_first(logits=logits)
        or reject_target_and_weight(logits, target, weight)
        or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)
    )


@channel_cross_entropy.worthwhile
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast, training):
    return UNMEASURED


@channel_cross_entropy.kernel(saves=("weights", "kept"))
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast, save):
    dtype = torch.float32 if upcast == "fp32" else logits.dtype
    loss = Loss(weight, ignore_index, smoothing)
    losses, weights, kept = forward(logits, target, loss, reduction == "none", save)
    return (losses / weights if reduction == "mean" else losses).to(dtype), weights, kept


@channel_cross_entropy.saved
def _(logits, target, weight, ignore_index, smoothing, reduction, upcast):
    x, counts = logits.float(), target != ignore_index
    top = x.amax(1)
    kept = torch.stack([top, (x - top[:, None]).exp().sum(1).log()])
    if weight is None:
        return counts.sum().float(), kept
    weights = weight[torch.where(counts, target, 0)].float()
    return torch.where(counts, weights, 0.0).sum(), kept


@channel_cross_entropy.backward
def _(saved, dloss):
    scale = dloss.float()
    if saved.reduction == "mean":
        scale = scale / saved.weights
    loss = Loss(saved.weight, saved.ignore_index, saved.smoothing)
    return backward(saved.logits, saved.target, saved.kept, scale, loss), None, None


@channel_cross_entropy.inputs(dict(b=2, c=12, n=5), dict(b=16, c=19, n=512))
def _(tensor, b, c, n):
    target = (tensor(b, n, n) > 0).long() + (tensor(b, n, n) > 0)
    return tensor(b, c, n, n), target, tensor(c).abs(), -100, 0.1, "mean", "none"
