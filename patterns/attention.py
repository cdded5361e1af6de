"""Scaled dot-product attention: softmax(scale · q kᵀ + mask) v over the last two dimensions.

q is `[..., h, n, d]`, k and v `[..., h, m, d]`, or with fewer heads (heads = grouped), each of which serves several of
q. One of: an additive mask; a boolean `keep`, where a row with nothing kept gives 0; `keep` with a finite or infinite
`fill` for what is not kept; a causal mask. Dropout of the probabilities with p. Source: Vaswani et al. 2017.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    fill: float | None,
    scale: float,
    p: float | None,
    heads: Literal["same", "grouped"],
    causal: Literal["full", "causal"],
) -> Tensor:
    if sum((mask is not None, keep is not None, causal == "causal")) > 1 or (fill is not None and keep is None):
        raise ValueError("one mask at most; fill belongs to keep")
    if fill is None:
        mask = keep if mask is None else mask
        grouped = heads == "grouped"
        options = dict(dropout_p=p or 0.0, is_causal=causal == "causal", scale=scale, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if heads == "grouped":
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = ((q @ k.mT) * scale).masked_fill(~keep, fill)
    weights = torch.softmax(scores, -1)
    return (weights if p is None else F.dropout(weights, p, True)) @ v


@attention.near_miss
def _(q, k, v, mask, keep, fill, scale, p, heads, causal):
    """softmax over the queries"""
    return torch.softmax((q @ q.mT) * scale, -2) @ q


@attention.near_miss
def _(q, k, v, mask, keep, fill, scale, p, heads, causal):
    """the scale after the softmax"""
    return (torch.softmax(q @ q.mT, -1) * scale + 1) @ q


@attention.guard
def _(q, k, v, mask, keep, fill, scale, p, heads, causal):
    return reject_dtypes(q=q, k=k, v=v, mask=mask) or reject_dynamic(fill=fill, scale=scale, p=p)


@attention.inputs(dict(b=2, h=4, n=6, d=8), dict(b=8, h=16, n=2048, d=128))
def _(tensor, b, h, n, d):
    q, k, v = tensor(b, h, n, d), tensor(b, 1, n, d), tensor(b, 1, n, d)  # one head for all is either form
    return q, k, v, tensor(n, n), tensor(n, n) > -1, -1e9, d**-0.5, 0.1, "same", "full"
