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
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels.cross_entropy import forward, reject_target, valid
from fusion_backend.kernels.inputs import dynamic, number, reject_dtypes, reject_dynamic
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
    return (
        reject_target(target)
        or reject_dtypes(logits=logits)
        or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)
    )


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


@cross_entropy.saved
def _(logits, target, ignore_index, smoothing, reduction, upcast):
    return torch.logsumexp(logits.reshape(-1, logits.shape[-1]).float(), 1)


@cross_entropy.backward(plain=True)
def _(saved, dloss):
    """(softmax - (1 - smoothing) onehot - smoothing / v) · scale, 0 where the target is ignored: what Inductor does as
    fast as a kernel, and where nobody else needs the logits, in their memory."""
    logits = saved.logits.reshape(-1, saved.logits.shape[-1])
    scale, counts = dloss.float(), (saved.target != saved.ignore_index)[:, None]
    if saved.reduction == "mean":
        scale = scale / counts.sum()
    elif saved.reduction == "none":
        scale = scale[:, None]
    classes = torch.arange(logits.shape[-1], device=logits.device)
    onehot = torch.where(classes == saved.target[:, None], 1.0 - saved.smoothing, 0.0)
    d = torch.exp(logits.float() - saved.lse[:, None]) - onehot - saved.smoothing / logits.shape[-1]
    d = torch.where(counts, d * scale, 0.0).to(logits.dtype)
    return d.view(saved.logits.shape), None


@cross_entropy.inputs(dict(rows=7, v=100), dict(rows=8192, v=32000))
def _(tensor, rows, v):
    return tensor(rows, v), (tensor(rows) > 0).long(), -100, 0.1, "mean", "none"
