"""Scaled dot-product attention: softmax(scale · q kᵀ + mask) v over the last two dimensions.

q is `[..., h, n, d]`, k `[..., h, m, d]` and v `[..., h, m, e]`, or k and v with fewer heads (heads
= grouped), each of which serves several of q. One of: an additive mask, or two (`mask` and `bias`),
or one with a `fill` for what a boolean `keep` does not keep; `keep` alone, where a row with nothing
kept gives 0; a causal mask. Before the masks the scores may be capped: cap · tanh(scores / cap).
With `windows`, `[w, n, m]`, and at most one additive mask, batch i has the mask of i modulo w as
well: the shifted windows of Swin. With `sinks`, which broadcasts to `[..., h, n, 1]`, each row of
the softmax has one score more, whose weight is dropped. Dropout of the probabilities with p.
Source: Vaswani et al. 2017; the cap: Gemma 2, 2024; learned sinks: gpt-oss, 2025; shifted windows:
Liu et al. 2021.

A mask that keeps everything, or is causal, is dropped: the site becomes one call of
`F.scaled_dot_product_attention`, also where it was written by hand, and without repeating the heads
of k and v; in training as own_plan.py has it. With a cap, sinks, windows or any other mask, it
becomes masked_attention, which reads bands, vectors over the keys, the numbers of documents, dense
masks and biases without the scores in memory; also where q, k and v have five dimensions, of which
the first is 1. Its dropout is of a new seed at each call, and not with the bits of eager or plain
Inductor.

If values have another size than queries and keys, SDPA has fused kernels on GPUs alone, for as many
heads of k and v as of q, of sizes that are multiples of 8. Otherwise such a site becomes
masked_attention even if no mask is left.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention.masks import approximated, joint, layout_of
from fusion_backend.patterns.attention.op import masked_attention, reject_shapes
from fusion_backend.patterns.attention.own_plan import sdpa_of_own_plan
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject, Replacement
from fusion_backend.compat.attention_plans import PLANS_CAN_BE_CONFUSED
from fusion_backend.kernels.common.inputs import (
    dynamic,
    number,
    reject_dtypes,
    reject_dynamic,
    same_sizes,
)
from fusion_backend.kernels.common.launch import on_gpu


@Pattern
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    keep: Tensor | None,
    fill: float | None,
    cap: float | None,
    sinks: Tensor | None,
    windows: Tensor | None,
    scale: float,
    p: float | None,
    heads: Literal["same", "grouped"],
    causal: Literal["full", "causal"],
) -> Tensor:
    reject_forms(mask, bias, keep, fill, cap, sinks, windows, causal)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError("q, k and v differ in dtype")
    mask = mask if mask is None else mask.to(q.dtype)
    # SDPA's gradient there of a row that sees nothing is not softmax's
    exact = mask is None or q.device.type != "cpu"
    if all(x is None for x in (fill, cap, bias, sinks, windows)) and exact:
        mask = keep if mask is None else mask
        grouped = heads == "grouped"
        options = dict(
            dropout_p=p or 0.0, is_causal=causal == "causal", scale=scale, enable_gqa=grouped
        )
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if heads == "grouped":
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = (q @ k.mT) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    for added in (mask, bias):
        scores = scores if added is None else scores + added
    if windows is not None:
        seen = scores.view(-1, windows.shape[0], *scores.shape[1:])
        scores = (seen + windows[None, :, None]).view(scores.shape)
    if keep is not None:
        scores = scores.masked_fill(~keep, fill)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)
    weights = weights if sinks is None else weights[..., :-1]
    return (weights if p is None else F.dropout(weights, p, True)).to(v.dtype) @ v


def reject_forms(mask, bias, keep, fill, cap, sinks, windows, causal) -> None:
    """What cannot be written, or nobody writes."""
    if (fill is not None and keep is None) or (
        keep is not None and fill is None and (mask, cap) != (None, None)
    ):
        raise ValueError("keep has a fill, or is alone")
    if causal == "causal" and any(x is not None for x in (mask, bias, keep, cap)):
        raise ValueError("causal has no other mask")
    if bias is not None and (mask is None or keep is not None or cap is not None):
        raise ValueError("a bias is added to a mask alone")
    if sinks is not None and (bias is not None or cap is not None or causal == "causal"):
        raise ValueError("sinks are beside scores with one mask at most")
    others = (bias, keep, cap, sinks, None if causal == "full" else causal)
    if windows is not None and any(x is not None for x in others):
        raise ValueError("beside masks of windows there is one other mask at most")
    if sinks is not None and keep is not None and (fill is None or mask is not None):
        raise ValueError("beside sinks keep has a fill, and no mask is added")


@attention.near_miss
def _(q, scale):
    """softmax over the queries"""
    return torch.softmax((q @ q.mT) * scale, -2) @ q


@attention.near_miss
def _(q, scale):
    """the scale after the softmax"""
    return (torch.softmax(q @ q.mT, -1) * scale + 1) @ q


@attention.near_miss
def _(q, mask, scale):
    """the cap after the mask"""
    return torch.softmax(torch.tanh(((q @ q.mT) * scale + mask) / 30.0) * 30.0, -1) @ q


@attention.replacement(asks=dict.fromkeys(("mask", "bias", "keep"), "attention_mask"))
def _(
    q, k, v, mask, bias, keep, fill, cap, sinks, windows, scale, p, heads, causal, known, training
):
    """`F.scaled_dot_product_attention` without a dense mask, where what the masks keep is
    everything or causal; else masked_attention.
    """
    tensors = dict(mask=mask, bias=bias, keep=keep)
    found = joint(known)
    if known and found is None:
        return Reject("whether one mask is narrower than the other depends on the sizes")
    why = finite_fill(found, fill, q.dtype)
    simple = found is None or found.everything or (found.causal and not why)
    simple = simple and all(x is None for x in (cap, sinks, windows))
    five = q.dim() == 5 and same_sizes(q.shape[:1], (1,))  # of which SDPA has no fused kernel
    simple = simple and sdpa_takes_sizes(q, k, v, heads) and not five
    if not simple or any(m.added is not None for m in known.values()):
        options = dict(fill=fill, cap=cap, sinks=sinks, windows=windows, scale=scale, p=p)
        return masked(q, k, v, tensors, known, training, why, causal=causal, **options)
    refused = reject_sdpa(q, k, v, heads, scale, p)
    if refused is not None:
        return refused
    is_causal = causal == "causal" or (found is not None and not found.everything)
    options = dict(dropout_p=p or 0.0, is_causal=is_causal, scale=scale)
    why = "one call, without the scores in memory"
    if found is not None:
        taken = [*found.taken, *([] if fill is None else [fill])]
        why = str(found) if found.everything else f"{found}{approximated(taken)}"
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    if training and heads == "same" and PLANS_CAN_BE_CONFUSED and on_gpu(q):
        return Replacement(sdpa_of_own_plan, (q, k, v), options, why, instead_of=sdpa)
    return Replacement(sdpa, (q, k, v), {**options, "enable_gqa": heads == "grouped"}, why)


def finite_fill(found, fill: float | None, dtype: torch.dtype) -> str:
    """Why a causal mask stays: its fill does not hide a score. Else empty."""
    if found is None or not found.causal or fill is None or found.hides(fill, dtype):
        return ""
    reach = "a score that others may reach"
    reach = "not -inf, and fusion.exact_masks is set" if found.exact else reach
    return f"{found}, but {fill:g} for what is masked is {reach}"


def masked(
    q, k, v, tensors: dict, known: dict, training: bool, why: str,
    *, fill, cap, sinks, windows, scale, p, causal,
) -> Replacement | Reject:  # fmt: skip
    """masked_attention, with as little of the masks in memory as what is known of them allows."""
    more = () if cap is None else (f"capped at {cap:g}",)
    more += () if sinks is None else ("with sinks",)
    more += () if windows is None else (f"masks of {windows.shape[0]} windows",)
    if not same_sizes(q.shape[-1:], v.shape[-1:]):
        sizes = number(q.shape[-1]), number(v.shape[-1])
        more += ("heads of {} with values of {}".format(*sizes),)
    why = why or "; ".join((*map(str, known.values()), *more))
    layout = layout_of(known, q, k, tensors, fill, training, sinks is not None)
    layout = layout.with_vector(known, tensors, q, k)
    if layout is None:
        return Reject(
            "our kernel adds one mask, and a second only if it is a vector over the keys without a "
            f"gradient, and nothing else hides keys one by one: {why}"
        )
    visible, biases = layout.visible, layout.biases
    if causal == "causal":
        visible = visible._replace(low=0)
    if visible.hidden == "zero":
        why += approximated(layout.taken)
    if any(dynamic(bound) for bound in (visible.low, visible.high) if bound is not None):
        return Reject(f"its mask stays: {why}; the kernel takes no dynamic band")
    bias = next(iter(biases), None)
    arguments = dict(
        q=q,
        k=k,
        v=v,
        bias=tensors[bias] if isinstance(bias, str) else bias,
        keep=tensors[layout.dense] if layout.dense else None,
        keys=visible.keys,
        seed=None if p is None else Replacement.SEED,
        sinks=sinks,
        windows=windows,
    )
    options = dict(
        low=visible.low, high=visible.high, fill=visible.fill, scale=scale, cap=cap, p=p,
        hidden=visible.hidden, padded=visible.keys_are,
    )  # fmt: skip
    masks = windows is not None or any(
        not m.everything or m.added is not None for m in known.values()
    )
    otherwise = "its mask stays" if masks else "its scores stay"
    return Replacement(masked_attention, tuple(arguments.values()), options, why, otherwise)


def sdpa_takes_sizes(q: Tensor, k: Tensor, v: Tensor, heads: str) -> bool:
    """Does SDPA have a fused kernel for heads of v of this size? If the size differs from that of q
    and k, it has two, on GPUs alone: for as many heads of k and v as of q, whose sizes, and the
    places in memory where rows begin, are multiples of 8.
    """
    if same_sizes(q.shape[-1:], v.shape[-1:]):
        return True
    numbers = (n for t in (q, k, v) for n in (t.shape[-1], t.storage_offset(), *t.stride()[:-1]))
    whole = all(statically_known_true(n % 8 == 0) for n in numbers)
    return on_gpu(q) and heads == "same" and whole


def reject_sdpa(q: Tensor, k: Tensor, v: Tensor, heads: str, scale, p) -> Reject | None:
    """Where SDPA has no fused kernel, and would compute the scores in memory."""
    refused = (
        reject_shapes(q, k, v, heads)
        or reject_dtypes(q=q, k=k, v=v)
        or reject_dynamic(scale=scale, p=p)
        or reject_strides(q, k, v)
    )
    if refused is None and heads == "grouped":
        refused = reject_grouped(q)
    if refused is None and p and not on_gpu(q):
        return Reject("with dropout SDPA has no fused kernel on CPU")
    return refused


def reject_strides(q: Tensor, k: Tensor, v: Tensor) -> Reject | None:
    """On CUDA SDPA falls to its formula, in fp32, where the last stride is not 1."""
    for name, t in dict(q=q, k=k, v=v).items():
        if (
            on_gpu(t)
            and statically_known_true(t.stride(-1) != 1)
            and statically_known_true(t.shape[-1] != 1)
        ):
            return Reject(
                f"the numbers of one head of {name} are {t.stride(-1)} apart: SDPA has no fused "
                "kernel for that"
            )


def reject_grouped(q: Tensor) -> Reject | None:
    """On CUDA only flash attention and cuDNN take fewer heads of k and v; the others would repeat
    them in memory.
    """
    if on_gpu(q) and (
        q.dtype == torch.float32 or not isinstance(q.shape[-1], int) or q.shape[-1] > 256
    ):
        return Reject(
            "the kernels of SDPA that take grouped heads take fp16 and bf16, and heads of 256 at "
            "most"
        )


@attention.guard
def _(q, k, v, mask, fill, cap, scale, p):
    return reject_dtypes(q=q, k=k, v=v, mask=mask) or reject_dynamic(
        fill=fill, cap=cap, scale=scale, p=p
    )


@attention.inputs(dict(b=2, h=4, n=6, d=8), dict(b=8, h=16, n=2048, d=128))
def _(
    tensor, b, h, n, d, e=0, causal=0, bias=0, padded=0, documents=0, window=0, cap=0, sinks=0,
    drop=0, hand=0,
):  # fmt: skip
    rows, images = tensor(1, h, 1, 1), tensor(2, n, n)
    if not any((causal, bias, padded, documents, window)):  # one head of k and v is either form
        q, k, v = tensor(b, h, n, d), tensor(b, 1, n, d), tensor(b, 1, n, d)
        masks = tensor(n, n), tensor(n, n), tensor(n, n) > -1
        return q, k, v, *masks, -1e9, 30.0, rows, images, d**-0.5, 0.1, "same", "full"
    q, k, v = (tensor(b, n, h, size).transpose(1, 2) for size in (d, d, e or d))
    seen = torch.arange(n, device=q.device) < n // 2
    keep = seen.expand(b, 1, 1, n).contiguous() if padded else None
    if documents:  # the number of each place's document: the code around makes the mask of them
        keep = (torch.arange(n, device=q.device) * documents // n).expand(b, n).contiguous()
    mask = tensor(1, h, n, n) if bias else None
    # either is written by hand
    fill, cap = float("-inf") if cap or hand else None, float(cap) if cap else None
    more = fill, cap, rows if sinks else None, None, d**-0.5, 0.1 if drop else None
    return q, k, v, mask, None, keep, *more, "same", "causal" if causal else "full"
