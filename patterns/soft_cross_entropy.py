"""Losses of rows of logits against given probabilities, over the last dimension.

With q = softmax(scale · logits): "cross_entropy" is -Σ p log q, as F.cross_entropy has it for soft
targets, "negated" Σ p log q, and "kl_div" the divergence Σ p (log p - log q). logits and target are
`[..., v]`, each in fp32, bf16 or fp16. Only a cross entropy has weights of the classes, `[v]`, and
smoothing, p (1 - s) + s / v; both may be missing. Weights that want a gradient are not recognised.
"rows" is a loss for each row, `[...]`; a "mean" of "cross_entropy" divides by the number of rows,
any other by that of the classes of all rows. With upcast "fp32" the logits are cast first. The sums
are in fp32; the backward keeps of each row the largest logit, the logarithm of the sum of e^(x -
largest), and the sum of the probabilities. Source: torch.nn.functional.cross_entropy and kl_div;
soft targets as in Szegedy et al. 2016 and Zhang et al. 2018 (mixup).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dynamic
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.loss.soft_targets import (
    Target,
    backward,
    finite_tops,
    for_each_row,
    forward,
    reduced,
    reject_operands,
)


@Pattern
def soft_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, scale: float, smoothing: float | None,
    loss: Literal["cross_entropy", "negated", "kl_div"],
    reduction: Literal["rows", "sum", "mean"],
    upcast: Literal["fp32", "none"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    wider = torch.promote_types(logits.dtype, torch.float32)
    logits = (logits.to(wider) if upcast == "fp32" else logits) * scale
    if loss == "cross_entropy":
        v, smoothing = logits.shape[-1], 0.0 if smoothing is None else smoothing
        target = target.to(torch.promote_types(logits.dtype, target.dtype))
        # weights that want a gradient, which they have beside probabilities, are not recognised
        weight = weight if weight is None else weight.detach().to(target.dtype)
        out = F.cross_entropy(
            logits.reshape(-1, v), target.reshape(-1, v), weight, label_smoothing=smoothing,
            reduction="none" if reduction == "rows" else reduction,
        )  # fmt: skip
        return out.view(logits.shape[:-1]) if reduction == "rows" else out
    if weight is not None or smoothing is not None:
        raise ValueError("only a cross entropy has weights and smoothing")
    log_q = torch.log_softmax(logits, -1)
    terms = F.kl_div(log_q, target, reduction="none") if loss == "kl_div" else target * log_q
    if reduction == "rows":
        return terms.sum(-1)
    return terms.mean() if reduction == "mean" else terms.sum()


@soft_cross_entropy.near_miss
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    """of the probabilities themselves"""
    return (target * torch.softmax(logits * scale, -1)).sum(-1)


@soft_cross_entropy.near_miss
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    """normalised over another dimension"""
    return (target * torch.log_softmax(logits * scale, 0)).sum(-1)


@soft_cross_entropy.near_miss
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    """one probability for all classes of a row"""
    return (target[..., :1] * torch.log_softmax(logits * scale, -1)).sum(-1)


@soft_cross_entropy.near_miss
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    """from targets that are logarithms"""
    return F.kl_div(torch.log_softmax(logits, -1), target, reduction="sum", log_target=True)


@soft_cross_entropy.guard
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    return reject_operands(logits, "target", target, weight) or reject_dynamic(
        scale=scale, smoothing=smoothing
    )


@soft_cross_entropy.worthwhile
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast, training):
    return UNMEASURED


def of_probabilities(target, weight, scale, smoothing, loss) -> Target:
    smoothing = 0.0 if smoothing is None else smoothing
    return Target(target, scale, divergence=loss == "kl_div", weight=weight, smoothing=smoothing)


@soft_cross_entropy.kernel(saves=("kept",))
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast, save):
    losses, kept = forward(logits, of_probabilities(target, weight, scale, smoothing, loss))
    dtype = torch.float32 if upcast == "fp32" else logits.dtype
    dtype = torch.promote_types(dtype, target.dtype)
    losses = -losses if loss == "negated" else losses
    return reduced(losses, logits, reduction, loss != "cross_entropy", dtype), kept


@soft_cross_entropy.saved
def _(logits, target, weight, scale, smoothing, loss, reduction, upcast):
    x = logits.reshape(-1, logits.shape[-1]).float() * scale
    p = target.reshape(x.shape).float()
    p = p if smoothing is None else p * (1 - smoothing) + smoothing / x.shape[-1]
    p = p if weight is None else p * weight.float()
    top = finite_tops(x)
    log, none = (x - top[:, None]).exp().sum(1).log(), torch.zeros_like(top)
    return torch.stack([top, log, p.sum(1), none, none])


@soft_cross_entropy.backward
def _(saved, dloss):
    dloss = -dloss if saved.loss == "negated" else dloss
    elements = saved.loss != "cross_entropy"
    dloss = for_each_row(dloss, saved.logits, saved.reduction, elements)
    target = of_probabilities(saved.target, saved.weight, saved.scale, saved.smoothing, saved.loss)
    needs = saved.needs["logits"], saved.needs["target"]
    return *backward(saved.logits, target, saved.kept, dloss, needs), None


@soft_cross_entropy.inputs(dict(rows=7, v=101), dict(rows=8192, v=32000))
def _(tensor, rows, v):
    target = torch.softmax(tensor(rows, v), -1)
    return tensor(rows, v), target, tensor(v).abs(), 0.5, 0.1, "cross_entropy", "mean", "none"
