"""Losses of rows of logits against a teacher's, over the last dimension.

With q = softmax(scale · logits) and p = softmax(teacher_scale · teacher): "kl_div" is Σ p (log p -
log q) from p as F.kl_div takes it, where a p of 0 adds nothing, "log_target" the same from log p,
"cross_entropy" -Σ p log q, and "negated" Σ p log q. logits and teacher are `[..., v]`, each in
fp32, bf16 or fp16. "rows" is a loss for each row, `[...]`; a "mean" of "cross_entropy" divides by
the number of rows, any other by that of the classes of all rows. With upcast "fp32" both are cast
first. The sums are in fp32; the backward keeps of each row the largest logit of both, the
logarithms of the sums of e^(x - largest), and the loss. Source: Hinton et al. 2015; Sanh et al.
2019 (DistilBERT).
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


def cross_entropy(logits: Tensor, p: Tensor, reduction: str) -> Tensor:
    v = logits.shape[-1]
    rows = "none" if reduction == "rows" else reduction
    out = F.cross_entropy(logits.reshape(-1, v), p.reshape(-1, v), reduction=rows)
    return out.view(logits.shape[:-1]) if reduction == "rows" else out


@Pattern
def distillation_loss(
    logits: Tensor, teacher: Tensor, scale: float, teacher_scale: float,
    loss: Literal["kl_div", "log_target", "cross_entropy", "negated"],
    reduction: Literal["rows", "sum", "mean"],
    upcast: Literal["fp32", "none"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    if upcast == "fp32":
        wider = torch.promote_types(logits.dtype, torch.float32)
        logits, teacher = logits.to(wider), teacher.to(wider)
    logits, teacher = logits * scale, teacher * teacher_scale
    p = torch.log_softmax(teacher, -1) if loss == "log_target" else torch.softmax(teacher, -1)
    if loss == "cross_entropy":
        return cross_entropy(logits, p, reduction)
    log_q = torch.log_softmax(logits, -1)
    if loss == "negated":
        terms = p * log_q
    else:
        terms = F.kl_div(log_q, p, reduction="none", log_target=loss == "log_target")
    if reduction == "rows":
        return terms.sum(-1)
    return terms.mean() if reduction == "mean" else terms.sum()


@distillation_loss.near_miss
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast):
    """against a teacher that is normalised over another dimension"""
    p = torch.softmax(teacher * teacher_scale, 0)
    return (p * torch.log_softmax(logits * scale, -1)).sum(-1)


@distillation_loss.near_miss
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast):
    """the terms added up over the rows"""
    p = torch.softmax(teacher * teacher_scale, -1)
    return (p * torch.log_softmax(logits * scale, -1)).sum(0)


@distillation_loss.near_miss
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast):
    """a difference of log-probabilities, weighted by the other distribution"""
    log_q = torch.log_softmax(logits * scale, -1)
    log_p = torch.log_softmax(teacher * teacher_scale, -1)
    return (torch.softmax(logits * scale, -1) * (log_p - log_q)).sum(-1)


@distillation_loss.guard
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast):
    return reject_operands(logits, "teacher", teacher) or reject_dynamic(
        scale=scale, teacher_scale=teacher_scale
    )


@distillation_loss.worthwhile
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast, training):
    return UNMEASURED


def of_teacher(teacher, scale, teacher_scale, loss) -> Target:
    divergence = loss in ("kl_div", "log_target")
    return Target(teacher, scale, True, teacher_scale, divergence, loss == "kl_div")


@distillation_loss.kernel(saves=("kept",))
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast, save):
    losses, kept = forward(logits, of_teacher(teacher, scale, teacher_scale, loss))
    losses = -losses if loss == "negated" else losses
    narrow = torch.promote_types(logits.dtype, teacher.dtype)
    dtype = torch.float32 if upcast == "fp32" else narrow
    return reduced(losses, logits, reduction, loss != "cross_entropy", dtype), kept


@distillation_loss.saved
def _(logits, teacher, scale, teacher_scale, loss, reduction, upcast):
    rows, moved = [], []
    for t, factor in ((logits, scale), (teacher, teacher_scale)):
        t = t.reshape(-1, t.shape[-1]).float() * factor
        top = finite_tops(t)
        moved.append(t - top[:, None])
        rows += [top, moved[-1].exp().sum(1).log()]
    (x, y), divergence = moved, loss in ("kl_div", "log_target")
    p = torch.softmax(y, 1)
    log_p = torch.where(p == 0, 0.0, y) if loss == "kl_div" else y
    return torch.stack([*rows, (p * ((log_p if divergence else 0.0) - x)).sum(1)])


@distillation_loss.backward
def _(saved, dloss):
    dloss = -dloss if saved.loss == "negated" else dloss
    dloss = for_each_row(dloss, saved.logits, saved.reduction, saved.loss != "cross_entropy")
    target = of_teacher(saved.teacher, saved.scale, saved.teacher_scale, saved.loss)
    needs = saved.needs["logits"], saved.needs["teacher"]
    return backward(saved.logits, target, saved.kept, dloss, needs)


@distillation_loss.inputs(dict(rows=7, v=101), dict(rows=8192, v=32000))
def _(tensor, rows, v):
    return tensor(rows, v), tensor(rows, v), 0.5, 0.5, "kl_div", "sum", "none"
