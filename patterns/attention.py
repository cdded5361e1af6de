"""Scaled dot-product attention: softmax(scale · q kᵀ + mask) v over the last two dimensions.

q is `[..., h, n, d]`, k and v `[..., h, m, d]`, or with fewer heads (heads = grouped), each of
which serves several of q. One of: an additive mask, or two (`mask` and `bias`), or one with a
`fill` for what a boolean `keep` does not keep; `keep` alone, where a row with nothing kept gives 0;
a causal mask. Before the masks the scores may be capped: cap · tanh(scores / cap). Dropout of the
probabilities with p. Source: Vaswani et al. 2017; the cap: Gemma 2, 2024.

A mask that keeps everything, or is causal, is dropped: the site becomes one call of
`F.scaled_dot_product_attention`, also where it was written by hand, and without repeating the heads
of k and v. With a cap, or any other mask, it becomes masked_attention, which reads bands, vectors
over the keys, dense masks and biases without the scores in memory. Its dropout is of a new seed at
each call, and not with the bits of eager or plain Inductor.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import LibraryCall, Pattern, Reject
from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash
from fusion_backend.kernels.common.dropout import Dropout, tiles_kept
from fusion_backend.kernels.common.dropout import scale as dropout_scale
from fusion_backend.kernels.common.inputs import (
    DTYPES,
    dynamic,
    number,
    reject_dtypes,
    reject_dynamic,
    same_sizes,
)
from fusion_backend.kernels.common.rows import UNMEASURED


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
    scale: float,
    p: float | None,
    heads: Literal["same", "grouped"],
    causal: Literal["full", "causal"],
) -> Tensor:
    reject_forms(mask, bias, keep, fill, cap, causal)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError("q, k and v differ in dtype")
    mask = mask if mask is None else mask.to(q.dtype)
    # SDPA's gradient there of a row that sees nothing is not softmax's
    exact = mask is None or q.device.type != "cpu"
    if fill is None and cap is None and bias is None and exact:
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
    if keep is not None:
        scores = scores.masked_fill(~keep, fill)
    weights = torch.softmax(scores, -1)
    return (weights if p is None else F.dropout(weights, p, True)).to(v.dtype) @ v


def reject_forms(mask, bias, keep, fill, cap, causal) -> None:
    """What cannot be written, or nobody writes."""
    if (fill is not None and keep is None) or (
        keep is not None and fill is None and (mask, cap) != (None, None)
    ):
        raise ValueError("keep has a fill, or is alone")
    if causal == "causal" and any(x is not None for x in (mask, bias, keep, cap)):
        raise ValueError("causal has no other mask")
    if bias is not None and (mask is None or keep is not None or cap is not None):
        raise ValueError("a bias is added to a mask alone")


@attention.near_miss
def _(q, k, v, mask, bias, keep, fill, cap, scale, p, heads, causal):
    """softmax over the queries"""
    return torch.softmax((q @ q.mT) * scale, -2) @ q


@attention.near_miss
def _(q, k, v, mask, bias, keep, fill, cap, scale, p, heads, causal):
    """the scale after the softmax"""
    return (torch.softmax(q @ q.mT, -1) * scale + 1) @ q


@attention.near_miss
def _(q, k, v, mask, bias, keep, fill, cap, scale, p, heads, causal):
    """the cap after the mask"""
    return torch.softmax(torch.tanh(((q @ q.mT) * scale + mask) / 30.0) * 30.0, -1) @ q


@attention.library(masks=("mask", "bias", "keep"))
def _(q, k, v, mask, bias, keep, fill, cap, scale, p, heads, causal, masks, training):
    """`F.scaled_dot_product_attention` without a dense mask, where what the masks keep is
    everything or causal; else our own kernels, which read bands and vectors of keys, and dense
    masks and biases without the scores in memory.
    """
    found, tensors = kept_by(masks), dict(mask=mask, bias=bias, keep=keep)
    if masks and found is None:
        return Reject("whether one mask is narrower than the other depends on the sizes")
    if found is not None and not (found.everything or found.causal):
        return by_kernel(q, k, tensors, fill, cap, scale, p, causal, masks, training)
    if found is not None and found.causal and fill is not None and not found.hides(fill, q.dtype):
        reach = (
            "not -inf, and fusion.exact_masks is set"
            if found.exact
            else "a score that others may reach"
        )
        why = f"{found}, but {fill:g} for what is masked is {reach}"
        return by_kernel(q, k, tensors, fill, cap, scale, p, causal, masks, training, why)
    if cap is not None or any(m.added is not None for m in masks.values()):
        return by_kernel(q, k, tensors, fill, cap, scale, p, causal, masks, training)
    no = (
        reject_shapes(q, k, v, heads)
        or reject_dtypes(q=q, k=k, v=v)
        or reject_dynamic(scale=scale, p=p)
    )
    no = no or reject_strides(q, k, v)
    if no is None and heads == "grouped":
        no = reject_grouped(q)
    if no is None and p and not q.is_cuda:
        no = Reject("with dropout SDPA has no fused kernel on CPU")
    if no is not None:
        return no
    is_causal = causal == "causal" or (found is not None and not found.everything)
    options = dict(
        dropout_p=p or 0.0, is_causal=is_causal, scale=scale, enable_gqa=heads == "grouped"
    )
    why = "one call, without the scores in memory"
    if found is not None:
        why = str(found) if found.everything else f"{found}{approximated(found.taken, fill)}"
    return LibraryCall(
        torch.ops.aten.scaled_dot_product_attention.default, ("q", "k", "v"), options, why
    )


def kept_by(masks: dict):
    """What all masks keep; None without a mask, or where their bounds cannot be compared."""
    first, *rest = masks.values() or [None]
    return first.together(rest[0]) if rest else first


class Seen(NamedTuple):
    """A band and a vector over the keys that say what is seen, and what becomes of what is not
    (kernels/flash.py).
    """

    low: int | None = None
    high: int | None = None
    keys: fx.Node | None = None
    padded: bool = False
    hidden: str = "zero"
    fill: float | None = None


def by_kernel(
    q, k, tensors: dict, fill, cap, scale, p, causal, masks: dict, training, why: str = ""
) -> LibraryCall | Reject:
    """masked_attention, with as little of the masks in memory as what is known of them allows."""
    why = why or "; ".join(
        (*map(str, masks.values()), *(() if cap is None else (f"capped at {cap:g}",)))
    )
    masks = {
        name: found
        for name, found in masks.items()
        if not found.everything or found.added is not None
    }
    chosen, dense = {name: found for name, found in masks.items() if found.choice}, None
    seen = seen_by(chosen, q, k, tensors, fill, training)
    if seen is None:  # then an additive mask is added as it is
        chosen = {name: found for name, found in chosen.items() if name == "keep"}
        seen = seen_by(chosen, q, k, tensors, fill, training)
    if seen is None:
        seen, dense = (
            Seen(chosen["keep"].low, chosen["keep"].high, None, False, *hiding(fill)),
            "keep",
        )
    biases = [name for name in masks if name not in chosen]
    biases += [found.added for found in chosen.values() if found.added is not None]
    if len(biases) > 1:
        return Reject(f"our kernel adds one mask, not two: {why}")
    if causal == "causal":
        seen = seen._replace(low=0)
    if seen.hidden == "zero":
        taken = [number for found in chosen.values() for number in found.taken]
        why += approximated(taken, fill if "keep" in chosen else None)
    if any(dynamic(bound) for bound in (seen.low, seen.high) if bound is not None):
        return Reject(f"its mask stays: {why}; the kernel takes no dynamic band")
    options = dict(
        low=seen.low, high=seen.high, fill=seen.fill, scale=scale, cap=cap, p=p, hidden=seen.hidden,
        padded="padding" if seen.padded else "seen",
    )  # fmt: skip
    operands = (
        "q",
        "k",
        "v",
        *(biases or [None]),
        dense,
        seen.keys,
        None if p is None else LibraryCall.SEED,
    )
    return LibraryCall(
        masked_attention, operands, options, why, "its mask stays" if masks else "its scores stay"
    )


def approximated(taken, fill: float | None) -> str:
    """Which finite numbers count as -inf, those of additive masks and the fill of a choice."""
    numbers = sorted({*taken, *((fill,) if fill is not None and fill > -math.inf else ())})
    return (
        f"; {' and '.join(f'{number:g}' for number in numbers)} taken for -inf" if numbers else ""
    )


def seen_by(masks: dict, q, k, tensors: dict, fill: float | None, training: bool) -> Seen | None:
    """What all masks keep; None where a band and a vector do not tell, nor what becomes of a row
    that sees nothing.
    """
    found = kept_by(masks)
    if not masks or found is None:
        return None if masks else Seen()
    hides = "keep" not in masks or fill is None or found.hides(fill, q.dtype)
    if hides and not found.parts and every_row_sees(found, q.shape[-2], k.shape[-2]):
        return Seen(found.low, found.high)
    keys = None
    if found.parts:
        name = next(name for name, mask in masks.items() if mask.parts)
        each = tensors[name].dim() == 4 and same_sizes(tensors[name].shape[:1], k.shape[:1])
        keys = found.parts[0].vector(k.shape[0]) if each and len(found.parts) == 1 else None
        if keys is None:
            return None
    if "keep" in masks:
        how = hiding(fill) if len(masks) == 1 else None
    else:  # a number beside which every score is lost: all keys of such a row weigh the same, and keep their gradient
        number, *others = {mask.fill for mask in masks.values()}
        lost = not others and number is not None and -math.inf < number <= -1e30 and not training
        how = ("fill", number) if lost else None
    return None if how is None else Seen(found.low, found.high, *(keys or (None, False)), *how)


def hiding(fill: float | None) -> tuple[str, float | None]:
    return (
        ("zero", None) if fill is None else ("nan", None) if fill == -math.inf else ("fill", fill)
    )


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
    """Attention of which kernels/flash.py says what the arguments mean, written out; dropout with
    p, by the seed.
    """
    times = q.shape[1] // k.shape[1]
    k, v = (t if times == 1 else t.repeat_interleave(times, 1) for t in (k, v))
    scores = (q @ k.mT) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores if bias is None else scores + bias
    apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
        k.shape[2], device=q.device
    )
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
    weights = (
        weights if p is None else weights * (tiles_kept(seed, weights.shape, p) * dropout_scale(p))
    )
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous().transpose(1, 2)


def masking_of(
    bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded
) -> flash.Masking:
    dropout = None if p is None else Dropout(seed, p)
    return flash.Masking(
        bias, keep, keys, padded == "padding", low, high, hidden, fill or 0.0, scale, cap, dropout
    )


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
    # inside a block places have 32 bits
    for name, t in dict(q=q, k=k, v=v, bias=bias, keep=keep).items():
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
    d = number(q.shape[3])
    measured = keep is None and d in (64, 128) and q.element_size() == 2
    measured = measured and (cap is None or (d == 128 and p is None))
    if not measured or statically_known_true(q.numel() < 1 << 23):
        return UNMEASURED


@masked_attention.kernel(saves=("lse",))
def _(q, k, v, bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded, save):
    masking = masking_of(bias, keep, keys, seed, low, high, fill, scale, cap, p, hidden, padded)
    return flash.forward(q, k, v, masking, save)


@masked_attention.backward(result=True)
def _(saved, do):
    masking = masking_of(
        saved.bias, saved.keep, saved.keys, saved.seed, saved.low, saved.high, saved.fill,
        saved.scale, saved.cap,
        saved.p, saved.hidden, saved.padded,
    )  # fmt: skip
    found = flash_backward.backward(
        saved.q, saved.k, saved.v, masking, saved.result, saved.lse, do, saved.needs
    )
    return *found, None, None, None


@masked_attention.inputs(
    dict(b=2, h=2, n=40, d=16, causal=1), dict(b=32, h=16, n=512, d=64, bias=1)
)
def _(tensor, b, h, n, d, causal=0, window=0, bias=0, dense=0, padded=0, drop=0):
    q, k, v = (tensor(b, n, h, d).transpose(1, 2) for _ in "qkv")
    masks = tensor(1, h, n, n) if bias else None, tensor(b, 1, n, n) > 0 if dense else None
    keys = (torch.arange(n, device=q.device) < n // 2).expand(b, n).contiguous() if padded else None
    seed = torch.full((1,), 7, device=q.device) if drop else None
    band = 0 if causal or window else None, window - 1 if window else None
    return (
        q,
        k,
        v,
        *masks,
        keys,
        seed,
        *band,
        None,
        d**-0.5,
        None,
        0.1 if drop else None,
        "zero",
        "seen",
    )


def reject_shapes(q: Tensor, k: Tensor, v: Tensor, heads: str) -> Reject | None:
    """What the fused kernels of SDPA do not take would fall back to computing the
    scores in memory.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        return Reject(
            "the fused kernels of SDPA take four dimensions: batch, heads, length, head size"
        )
    outer = 1 if heads == "grouped" else 2
    if not (
        same_sizes(q.shape[:outer], k.shape[:outer]) and same_sizes(k.shape[:-1], v.shape[:-1])
    ):
        return Reject("q, k and v differ in batch, heads or length")
    if not (same_sizes(q.shape[-1:], v.shape[-1:]) and same_sizes(q.shape[-1:], k.shape[-1:])):
        return Reject("the heads of v have another size")


def reject_strides(q: Tensor, k: Tensor, v: Tensor) -> Reject | None:
    """On CUDA SDPA falls to its formula, in fp32, where the last stride is not 1."""
    for name, t in dict(q=q, k=k, v=v).items():
        if (
            t.is_cuda
            and statically_known_true(t.stride(-1) != 1)
            and statically_known_true(t.shape[-1] != 1)
        ):
            return Reject(
                f"the numbers of one head of {name} are {t.stride(-1)} apart: SDPA has no fused kernel for that"
            )


def reject_grouped(q: Tensor) -> Reject | None:
    """On CUDA only flash attention and cuDNN take fewer heads of k and v; the others would repeat
    them in memory.
    """
    if q.is_cuda and (
        q.dtype == torch.float32 or not isinstance(q.shape[-1], int) or q.shape[-1] > 256
    ):
        return Reject(
            "the kernels of SDPA that take grouped heads take fp16 and bf16, and heads of 256 at most"
        )


@attention.guard
def _(q, k, v, mask, bias, keep, fill, cap, scale, p, heads, causal):
    return reject_dtypes(q=q, k=k, v=v, mask=mask) or reject_dynamic(
        fill=fill, cap=cap, scale=scale, p=p
    )


@attention.inputs(dict(b=2, h=4, n=6, d=8), dict(b=8, h=16, n=2048, d=128))
def _(tensor, b, h, n, d, causal=0, bias=0, padded=0, window=0, cap=0, drop=0, hand=0):
    if not (causal or bias or padded or window):  # one head for all of k and v is either form
        q, k, v = tensor(b, h, n, d), tensor(b, 1, n, d), tensor(b, 1, n, d)
        return (
            q,
            k,
            v,
            tensor(n, n),
            tensor(n, n),
            tensor(n, n) > -1,
            -1e9,
            30.0,
            d**-0.5,
            0.1,
            "same",
            "full",
        )
    q, k, v = (tensor(b, n, h, d).transpose(1, 2) for _ in "qkv")
    keep = (
        (torch.arange(n, device=q.device) < n // 2).expand(b, 1, 1, n).contiguous()
        if padded
        else None
    )
    mask = tensor(1, h, n, n) if bias else None
    # either is written by hand
    fill, cap = float("-inf") if cap or hand else None, float(cap) if cap else None
    word = "causal" if causal else "full"
    return q, k, v, mask, None, keep, fill, cap, d**-0.5, 0.1 if drop else None, "same", word
