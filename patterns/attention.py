"""Scaled dot-product attention: softmax(scale · q kᵀ + mask) v over the last two dimensions.

q is `[..., h, n, d]`, k and v `[..., h, m, d]`, or with fewer heads (heads = grouped), each of which serves several of
q. One of: an additive mask; a boolean `keep`, where a row with nothing kept gives 0; `keep` with a finite or infinite
`fill` for what is not kept; a causal mask. Dropout of the probabilities with p. Source: Vaswani et al. 2017.

A mask that keeps everything, or is causal, is dropped: the site becomes one call of `F.scaled_dot_product_attention`,
also where it was written by hand, and without repeating the heads of k and v. With any other mask it becomes
masked_attention, which reads bands, vectors over the keys, dense masks and biases without the scores in memory. Its
dropout is of a new seed at each call, and not with the bits of eager or plain Inductor.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import LibraryCall, Pattern, Reject
from fusion_backend.kernels import flash, flash_backward
from fusion_backend.kernels.dropout import Dropout, tiles_kept
from fusion_backend.kernels.dropout import scale as dropout_scale
from fusion_backend.kernels.inputs import DTYPES, dynamic, number, reject_dtypes, reject_dynamic, same_sizes
from fusion_backend.kernels.rows import RESULTS, UNMEASURED


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
    """`F.scaled_dot_product_attention` without a dense mask, where what the mask keeps is everything or causal; else
    our own kernels, which read bands and vectors of keys, and dense masks and biases without the scores in memory."""
    found = masks.get("mask") or masks.get("keep")
    if found is not None and not (found.everything or found.causal):
        return by_kernel(q, k, keep, fill, scale, p, causal, found)
    if found is not None and found.causal and fill is not None and not found.hides(fill, q.dtype):
        why = f"{found}, but {fill:g} for what is masked is a score that others may reach"
        return by_kernel(q, k, keep, fill, scale, p, causal, found, why)
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


def by_kernel(q, k, keep, fill, scale, p, causal, found, why: str | None = None) -> LibraryCall | Reject:
    """masked_attention, with as little of the mask in memory as what is known of it allows."""
    why = why or str(found)
    low, high = found.low, found.high
    if causal == "causal":
        low = 0
    alone = not found.parts and every_row_sees(found, q.shape[-2], k.shape[-2])
    hides = keep is None or fill is None or found.hides(fill, q.dtype)
    each = keep is not None and keep.dim() == 4 and same_sizes(keep.shape[:1], k.shape[:1])
    vector = found.parts[0].vector(k.shape[0]) if each and len(found.parts) == 1 else None
    bias, dense, keys, padded = None, None, None, False
    if alone and hides:
        hidden = "zero"
    elif keep is None:  # an additive mask says itself what becomes of a row that sees nothing
        bias, low, high, hidden = "mask", None, None, "zero"
    else:
        hidden = "zero" if fill is None else "nan" if fill == -math.inf else "fill"
        keys, padded = vector or (None, False)
        dense = "keep" if found.parts and keys is None else None
    if any(dynamic(bound) for bound in (low, high) if bound is not None):
        return Reject(f"its mask stays: {why}; the kernel takes no dynamic band")
    options = dict(
        low=low, high=high, fill=fill if hidden == "fill" else None, scale=scale, cap=None, p=p, hidden=hidden,
        padded="padding" if padded else "seen",
    )  # fmt: skip
    seed = None if p is None else LibraryCall.SEED
    return LibraryCall(masked_attention, ("q", "k", "v", bias, dense, keys, seed), options, why)


def every_row_sees(found, n, m) -> bool:
    """Has every query a key in the band?"""
    low, high = found.low, found.high
    first = low is None or statically_known_true(low <= 0)
    last = high is None or statically_known_true(n - 1 - high < m)
    return first and last and (low is None or high is None or statically_known_true(low <= high))


@Pattern(matched=False)
def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    keys: Tensor | None,
    seed: Tensor | None,
    low: int | None,
    high: int | None,
    fill: float | None,
    scale: float,
    cap: float | None,
    p: float | None,
    hidden: Literal["zero", "nan", "fill"],
    padded: Literal["seen", "padding"],
) -> Tensor:
    """Attention of which kernels/flash.py says what the arguments mean, written out; dropout with p, by the seed."""
    times = q.shape[1] // k.shape[1]
    k, v = (t if times == 1 else t.repeat_interleave(times, 1) for t in (k, v))
    scores = (q @ k.mT) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores if bias is None else scores + bias
    apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    seen = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand_as(scores)
    if keys is not None:
        keys = keys if keys.dim() == 2 else keys[:, 0, 0]
        seen = seen & (keys != (padded == "padding"))[:, None, None]
    seen = seen if low is None else seen & (apart >= low)
    seen = seen if high is None else seen & (apart <= high)
    scores = scores.masked_fill(~seen, fill if hidden == "fill" else -math.inf)
    if hidden == "zero":
        some = seen.any(-1, True)
        weights = torch.softmax(scores.masked_fill(~some, 0.0), -1) * some
    else:
        weights = torch.softmax(scores, -1)
    weights = weights if p is None else weights * (tiles_kept(seed, weights.shape, p) * dropout_scale(p))
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous().transpose(1, 2)


def masking_of(bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded) -> flash.Masking:
    dropout = None if p is None else Dropout(seed, p)
    return flash.Masking(bias, keep, keys, padded == "padding", low, high, hidden, fill or 0.0, scale, cap, dropout)


@masked_attention.guard
def _(q, k, v, bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded):
    return (
        reject_shapes(q, k, v, "grouped")
        or reject_dtypes(q=q, k=k, v=v)
        or reject_dynamic(low=low, high=high, fill=fill, scale=scale, cap=cap, p=p)
        or reject_masks(q, k, v, bias, keep, keys)
        or reject_heads(q, k, v)
        or (Reject(f"the scale {scale:g} is not positive") if scale <= 0 else None)
    )


def reject_heads(q: Tensor, k: Tensor, v: Tensor) -> Reject | None:
    d, heads, kv_heads = (number(size) for size in (q.shape[3], q.shape[1], k.shape[1]))
    if dynamic(d) or not 16 <= d <= 256:
        return Reject(f"heads of {d}; the kernel takes 16 to 256")
    if q.dtype == torch.float32 and d > 128:
        return Reject(f"heads of {d} in fp32 exceed the registers")
    if dynamic(heads) or dynamic(kv_heads) or heads % kv_heads:
        return Reject(f"{heads} heads of q for {kv_heads} of k and v")
    for name, t in dict(q=q, k=k, v=v).items():
        if dynamic(t.stride(3)) or t.stride(3) != 1:
            return Reject(f"the numbers of one head of {name} are {t.stride(3)} apart")
        if statically_known_true(t.numel() == 0):
            return Reject(f"{name} is empty")


FAR = 1 << 23  # times 256 rows


def reject_masks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None, keys: Tensor | None
) -> Reject | None:
    """What the kernel cannot read where it is."""
    full = (*q.shape[:3], k.shape[2])
    for name, t in dict(q=q, k=k, v=v, bias=bias, keep=keep).items():  # inside a block places have 32 bits
        if t is not None and t.dim() > 1 and statically_known_true(t.stride(-2) >= FAR):
            return Reject(f"the rows of {name} are {t.stride(-2)} apart")
    for name, t in dict(bias=bias, keep=keep).items():
        if t is None:
            continue
        fits = t.dim() <= 4 and all(
            same_sizes((have,), (want,)) or same_sizes((have,), (1,))
            for have, want in zip(reversed(t.shape), reversed(full), strict=False)
        )
        if not fits:
            return Reject(f"{name} with shape {tuple(t.shape)} does not broadcast to {tuple(full)}")
        if t.dtype not in ((torch.bool,) if name == "keep" else DTYPES):
            return Reject(f"{name} is {t.dtype}")
    if keys is not None:
        batches = same_sizes(keys.shape[:1], q.shape[:1]) or same_sizes(keys.shape[:1], (1,))
        if keys.dtype != torch.bool or not batches or not same_sizes(keys.shape[-1:], k.shape[2:3]):
            return Reject(f"the vector of keys is {keys.dtype} with shape {tuple(keys.shape)}")


@masked_attention.worthwhile
def _(q, k, v, bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded, training):
    plain = low is None and high is None and keep is None and cap is None and p is None
    if not plain or number(q.shape[3]) != 64 or q.element_size() != 2 or statically_known_true(q.numel() < 1 << 23):
        return UNMEASURED
    if bias is not None and not training:
        return Reject(f"Inductor's attention with a bias is as fast without gradients ({RESULTS})")


@masked_attention.kernel(saves=("lse",))
def _(q, k, v, bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded, save):
    masking = masking_of(bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded)
    return flash.forward(q, k, v, masking, save)


@masked_attention.backward(result=True)
def _(saved, do):
    masking = masking_of(
        saved.bias, saved.keep, saved.keys, saved.seed, saved.low, saved.high, saved.fill, saved.scale, saved.cap,
        saved.p, saved.hidden, saved.padded,
    )  # fmt: skip
    found = flash_backward.backward(saved.q, saved.k, saved.v, masking, saved.result, saved.lse, do, saved.needs)
    return *found, None, None, None


@masked_attention.inputs(dict(b=2, h=2, n=40, d=16, causal=1), dict(b=32, h=16, n=512, d=64, bias=1))
def _(tensor, b, h, n, d, causal=0, window=0, bias=0, dense=0, padded=0, drop=0):
    q, k, v = (tensor(b, n, h, d).transpose(1, 2) for _ in "qkv")
    masks = tensor(1, h, n, n) if bias else None, tensor(b, 1, n, n) > 0 if dense else None
    keys = (torch.arange(n, device=q.device) < n // 2).expand(b, n).contiguous() if padded else None
    seed = torch.full((1,), 7, device=q.device) if drop else None
    band = 0 if causal or window else None, window - 1 if window else None
    return q, k, v, *masks, keys, seed, *band, None, d**-0.5, None, 0.1 if drop else None, "zero", "seen"


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
def _(tensor, b, h, n, d, causal=0, bias=0, padded=0, window=0):
    if not (causal or bias or padded or window):  # one head for all of k and v is either form
        q, k, v = tensor(b, h, n, d), tensor(b, 1, n, d), tensor(b, 1, n, d)
        return q, k, v, tensor(n, n), tensor(n, n) > -1, -1e9, d**-0.5, 0.1, "same", "full"
    q, k, v = (tensor(b, n, h, d).transpose(1, 2) for _ in "qkv")
    keep = (torch.arange(n, device=q.device) < n // 2).expand(b, 1, 1, n).contiguous() if padded else None
    mask = tensor(1, h, n, n) if bias else None
    return q, k, v, mask, keep, None, d**-0.5, None, "same", "causal" if causal else "full"
