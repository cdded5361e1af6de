"""Scaled dot-product attention: softmax(scale · q kᵀ + mask) v over the last two dimensions.

q is `[..., h, n, d]`, k and v `[..., h, m, d]`, or with fewer heads (heads = grouped), each of which serves several of
q. One of: an additive mask; a boolean `keep`, where a row with nothing kept gives 0; `keep` with a finite or infinite
`fill` for what is not kept; a causal mask. Dropout of the probabilities with p. Source: Vaswani et al. 2017.

A mask that keeps everything, or is causal, is dropped: the site becomes one call of `F.scaled_dot_product_attention`,
also where it was written by hand, and without repeating the heads of k and v. Any other mask stays.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import LibraryCall, Pattern, Reject
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic, same_sizes


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


@attention.library(masks=("mask", "keep"))
def _(q, k, v, mask, keep, fill, scale, p, heads, causal, masks):
    """`F.scaled_dot_product_attention` without a dense mask, where what the mask keeps is everything or causal."""
    found = masks.get("mask") or masks.get("keep")
    if found is not None and not (found.everything or found.causal):
        return Reject(f"its mask stays: {found}")
    if found is not None and found.causal and fill is not None and not found.hides(fill, q.dtype):
        return Reject(f"{found}, but {fill:g} for what is masked is a score that others may reach")
    no = reject_shapes(q, k, v, heads) or reject_dtypes(q=q, k=k, v=v) or reject_dynamic(scale=scale, p=p)
    if no is None and heads == "grouped":
        no = reject_grouped(q)
    if no is None and p and not q.is_cuda:
        no = Reject("with dropout SDPA has no fused kernel on CPU")
    if no is not None:
        return no
    is_causal = causal == "causal" or (found is not None and not found.everything)
    options = dict(dropout_p=p or 0.0, is_causal=is_causal, scale=scale, enable_gqa=heads == "grouped")
    why = str(found) if found is not None else "one call, without the scores in memory"
    return LibraryCall(torch.ops.aten.scaled_dot_product_attention.default, ("q", "k", "v"), options, why)


def reject_shapes(q: Tensor, k: Tensor, v: Tensor, heads: str) -> Reject | None:
    """What the fused kernels of SDPA do not take would fall back to computing the scores in memory."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return Reject("the fused kernels of SDPA take four dimensions: batch, heads, length, head size")
    outer = 1 if heads == "grouped" else 2
    if not (same_sizes(q.shape[:outer], k.shape[:outer]) and same_sizes(k.shape[:-1], v.shape[:-1])):
        return Reject("q, k and v differ in batch, heads or length")
    if not (same_sizes(q.shape[-1:], v.shape[-1:]) and same_sizes(q.shape[-1:], k.shape[-1:])):
        return Reject("the heads of v have another size")


def reject_grouped(q: Tensor) -> Reject | None:
    """On CUDA only flash attention and cuDNN take fewer heads of k and v; the others would repeat them in memory."""
    if q.is_cuda and (q.dtype == torch.float32 or not isinstance(q.shape[-1], int) or q.shape[-1] > 256):
        return Reject("the kernels of SDPA that take grouped heads take fp16 and bf16, and heads of 256 at most")


@attention.guard
def _(q, k, v, mask, keep, fill, scale, p, heads, causal):
    return reject_dtypes(q=q, k=k, v=v, mask=mask) or reject_dynamic(fill=fill, scale=scale, p=p)


@attention.inputs(dict(b=2, h=4, n=6, d=8), dict(b=8, h=16, n=2048, d=128))
def _(tensor, b, h, n, d):
    q, k, v = tensor(b, h, n, d), tensor(b, 1, n, d), tensor(b, 1, n, d)  # one head for all is either form
    return q, k, v, tensor(n, n), tensor(n, n) > -1, -1e9, d**-0.5, 0.1, "same", "full"
