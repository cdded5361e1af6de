"""Log-probabilities of given tokens: y[token] - log Σ e^y, over the last dimension; y = x · scale.

x is `[..., v]` in fp32, bf16 or fp16; scale is a number, such as one over the temperature, or
missing; index `[..., 1]` int64, one token a row, or `[rows, 1]` for the rows of x. The result is
`[..., 1]`, or `[...]` with column "dropped", in x's dtype, or in fp32 with upcast "fp32". take is
the operator that selects. As in torch, an index outside [0, v) fails an assertion with "gather",
and one outside [-v, v) with "index", x[arange, i]; "take_along_dim" takes it modulo v. total is the
operator that gives the logarithm of the sum: with "log_softmax" a row with an infinite logit is
NaN; with "logsumexp" its sum is infinite, and also with "negated", where the result is the loss of
each token, log Σ e^y - y[token]. The sums are in fp32. The backward keeps the largest logit of each
row and the logarithm of the sum of e^(y - largest), `[2, rows]`. The gradient of x is scale ·
(onehot - softmax(y)) times that of the result, in one pass. Source: torch.log_softmax and
torch.gather, as policy-gradient and preference losses have them (PPO, Schulman et al. 2017; DPO,
Rafailov et al. 2023; GRPO, Shao et al. 2024).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.loss.token_log_probs import backward, check, forward

TIMED = 8192 * 128256  # logits


def by_advanced_indexing(y: Tensor, index: Tensor) -> Tensor:
    """y[arange(b)[:, None], arange(s), i], one element of each row. An index below 0 counts from
    the end of its row.
    """
    i = index.squeeze(-1)
    rows = [
        torch.arange(size, device=y.device).view(-1, *[1] * (i.dim() - 1 - axis))
        for axis, size in enumerate(i.shape)
    ]
    return torch.ops.aten.index.Tensor(y, [*rows, i]).unsqueeze(-1)


@Pattern(reciprocal=True)
def token_log_probs(
    x: Tensor, index: Tensor, scale: float | None,
    take: Literal["gather", "take_along_dim", "index"],
    total: Literal["log_softmax", "logsumexp", "negated"],
    upcast: Literal["fp32", "none"],
    column: Literal["dropped", "kept"],
) -> Tensor:  # fmt: skip
    # "fp32" comes first: of two forms that fit, the one that reads the narrow logits.
    x = x.reshape(*index.shape[:-1], x.shape[-1])
    x = x.float() if upcast == "fp32" else x
    x = x if scale is None else x * scale
    y = torch.log_softmax(x, -1) if total == "log_softmax" else x
    if take == "gather":
        y = y.gather(-1, index)
    elif take == "index":
        y = by_advanced_indexing(y, index)
    else:
        y = torch.take_along_dim(y, index, -1)
    if total != "log_softmax":
        sums = torch.logsumexp(x, -1, keepdim=True)
        y = sums - y if total == "negated" else y - sums
    return y.squeeze(-1) if column == "dropped" else y


@token_log_probs.near_miss
def _(x, index, scale, take, total, upcast, column):
    """the probabilities themselves"""
    y = torch.softmax(x if scale is None else x * scale, -1).gather(-1, index)
    return y.squeeze(-1) if column == "dropped" else y


@token_log_probs.near_miss
def _(x, index, scale, take, total, upcast, column):
    """log-probabilities over another dimension"""
    y = torch.log_softmax(x if scale is None else x * scale, 0).gather(-1, index)
    return y.squeeze(-1) if column == "dropped" else y


@token_log_probs.near_miss
def _(x, index, scale, take, total, upcast, column):
    """two tokens a row"""
    y = torch.log_softmax(x if scale is None else x * scale, -1)
    return y.gather(-1, torch.cat([index, index], -1))


@token_log_probs.guard
def _(x, index, scale, take, total, upcast, column):
    if not x.dim() or not index.dim():
        return Reject("x or index is a single number")
    if dynamic(x.shape[-1]):
        return Reject("the number of classes is dynamic")
    v = number(x.shape[-1])
    if v == 0:
        return Reject("there are no classes")
    if v > 1 and (dynamic(x.stride(-1)) or x.stride(-1) != 1):
        return Reject(f"the logits of a row are {x.stride(-1)} apart")
    if not statically_known_true(index.shape[-1] == 1):
        return Reject(f"index has {index.shape[-1]} columns, not one")
    if not statically_known_true(index.numel() * v == x.numel()):
        return Reject(f"x has shape {tuple(x.shape)} and index {tuple(index.shape)}")
    return reject_dtypes(x=x) or reject_dynamic(scale=scale)


@token_log_probs.worthwhile
def _(x, index, scale, take, total, upcast, column, training):
    large = statically_known_true(x.numel() >= TIMED) and number(x.shape[-1]) >= 65536
    timed = (take, total, x.dtype) == ("gather", "log_softmax", torch.bfloat16)
    return None if large and timed else UNMEASURED


@token_log_probs.kernel(saves=("sums",))
def _(x, index, scale, take, total, upcast, column, save):
    if take != "take_along_dim":
        check(index, x.shape[-1], 0 if take == "gather" else -x.shape[-1])
    dtype = torch.float32 if upcast == "fp32" else x.dtype
    infinite = math.nan if total == "log_softmax" else math.inf
    scale = 1.0 if scale is None else scale
    out, sums = forward(x, index, dtype, take != "gather", infinite, scale)
    out = -out if total == "negated" else out
    return out.view(index.shape[:-1] if column == "dropped" else index.shape), sums


@token_log_probs.saved
def _(x, index, scale, take, total, upcast, column):
    rows = x.reshape(-1, x.shape[-1]).float() * (1.0 if scale is None else scale)
    top = rows.amax(1, keepdim=True)
    top = torch.where(top.abs() == math.inf, 0.0, top)
    log = (rows - top).exp().sum(1).log()
    log = torch.where(log == math.inf, math.nan, log) if total == "log_softmax" else log
    return torch.stack([top[:, 0], log])


@token_log_probs.backward
def _(saved, dout):
    wraps, dout = saved.take != "gather", -dout if saved.total == "negated" else dout
    scale = 1.0 if saved.scale is None else saved.scale
    return backward(dout, saved.x, saved.index, saved.sums, wraps, scale), None


@token_log_probs.inputs(dict(b=2, s=3, v=101), dict(b=4, s=2048, v=128256))
def _(tensor, b, s, v):
    index = (tensor(b, s, 1) > 0).long() * (v - 1)
    return tensor(b, s, v), index, 1 / 0.9, "gather", "log_softmax", "none", "dropped"
