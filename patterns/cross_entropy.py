"""Cross entropy over rows of logits: the negative log of the target's softmax.

logits is `[..., v]`, target int64 with as many elements as there are rows; rows whose target is ignore_index do not
count. smoothing mixes the target with the uniform distribution. Source: torch.nn.functional.cross_entropy.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, reduction: Literal["mean", "sum", "none"]
) -> Tensor:
    logits = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction)


@cross_entropy.near_miss
def _(logits, target, ignore_index, smoothing, reduction):
    """of probabilities"""
    return F.nll_loss(logits.softmax(-1), target, ignore_index=ignore_index, reduction=reduction)


@cross_entropy.near_miss
def _(logits, target, ignore_index, smoothing, reduction):
    """with classes in another dimension"""
    return F.cross_entropy(logits[None, :, :].mT, target[None], ignore_index=ignore_index, reduction=reduction)


@cross_entropy.guard
def _(logits, target, ignore_index, smoothing, reduction):
    return reject_dtypes(logits=logits) or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)


@cross_entropy.inputs(dict(rows=7, v=100), dict(rows=8192, v=32000))
def _(tensor, rows, v):
    return tensor(rows, v), (tensor(rows) > 0).long(), -100, 0.1, "mean"
