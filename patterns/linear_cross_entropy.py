"""The last linear layer and its loss: cross entropy of x W + b, without the logits in memory.

x is `[..., k]`, W `[k, v]` with any strides, b `[v]` may be missing, target int64 with as many elements as x has rows.
The loss has the dtype of the logits, or is float32, as under autocast and where the logits are upcast.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: Literal["mean", "sum", "none"],
    loss: Literal["same", "float32"],
) -> Tensor:
    logits = x @ w if b is None else x @ w + b
    logits = logits.float() if loss == "float32" else logits
    logits = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction)


@linear_cross_entropy.near_miss
def _(x, w, b, target, ignore_index, smoothing, reduction, loss):
    """of probabilities"""
    return F.nll_loss((x @ w).softmax(-1), target, ignore_index=ignore_index, reduction=reduction)


@linear_cross_entropy.guard
def _(x, w, b, target, ignore_index, smoothing, reduction, loss):
    return reject_dtypes(x=x, w=w, b=b) or reject_dynamic(ignore_index=ignore_index, smoothing=smoothing)


@linear_cross_entropy.inputs(dict(rows=7, k=33, v=100), dict(rows=8192, k=4096, v=32000))
def _(tensor, rows, k, v):
    return tensor(rows, k), tensor(k, v), tensor(v), (tensor(rows) > 0).long(), -100, 0.1, "mean", "same"
