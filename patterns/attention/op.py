"""The op that attention with a mask becomes: bands, vectors over the keys, documents, dense masks,
biases, a cap, sinks and dropout, without the scores in memory.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from fusion_backend.patterns.attention.masks import broadcasts
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Op, Reject
from fusion_backend.kernels.attention import backward, forward
from fusion_backend.kernels.attention.backward import shared
from fusion_backend.kernels.attention.configs import short
from fusion_backend.kernels.attention.masking import Masking
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

FAR = 1 << 23  # times 256 rows


@Op
def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    keys: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    windows: Tensor | None,
    low: int | None,
    high: int | None,
    fill: float | None,
    scale: float,
    cap: float | None,
    p: float | None,
    hidden: Literal["zero", "nan", "fill"],
    padded: Literal["seen", "padding", "documents", "added"],
) -> Tensor:
    """Attention of which `Masking` in kernels/attention/masking.py says what the arguments mean,
    written out; dropout with p, by the seed. `padded` is its `keys_are`. windows `[w, n, m]` is
    added to the scores as well; batch i has that of i modulo w. In front of all dimensions q may
    have one more, of size 1, and the others with it.
    """
    if q.dim() == 5:
        q, k, v, bias, keep, keys, sinks = (squeezed(t) for t in (q, k, v, bias, keep, keys, sinks))
        rest = low, high, fill, scale, cap, p, hidden, padded
        return masked_attention(q, k, v, bias, keep, keys, seed, sinks, windows, *rest).unsqueeze(0)
    times = q.shape[1] // k.shape[1]
    k, v = (t if times == 1 else t.repeat_interleave(times, 1) for t in (k, v))
    scores = (q @ k.mT) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores if bias is None else scores + bias
    if windows is not None:
        scores = scores + windows.repeat(q.shape[0] // windows.shape[0], 1, 1)[:, None]
    apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
        k.shape[2], device=q.device
    )
    if padded == "added" and keys is not None:
        scores, keys = scores + keys, None
    seen = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand_as(scores)
    if padded == "documents" and keys is not None:
        numbers = keys if keys.dim() == 2 else keys[None]
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    elif keys is not None:
        keys = keys if keys.dim() == 2 else keys[:, 0, 0]
        seen = seen & (keys != (padded == "padding"))[:, None, None]
    seen = seen if low is None else seen & (apart >= low)
    seen = seen if high is None else seen & (apart <= high)
    scores = scores.masked_fill(~seen, fill if hidden == "fill" else -math.inf)
    if sinks is not None:
        column = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    elif hidden == "zero":
        some = seen.any(-1, True)
        weights = torch.softmax(scores.masked_fill(~some, 0.0), -1) * some
    else:
        weights = torch.softmax(scores, -1)
    weights = (
        weights if p is None else weights * (tiles_kept(seed, weights.shape, p) * dropout_scale(p))
    )
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous().transpose(1, 2)


def squeezed(t: Tensor | None) -> Tensor | None:
    """Without the first of five dimensions, of size 1."""
    return t.squeeze(0) if t is not None and t.dim() == 5 else t


def masking_of(
    bias, keep, keys, seed, sinks, windows, low, high, fill, scale, cap, p, hidden, padded
) -> Masking:
    """What the kernels are told about the masks. They add one bias: the sum of two is small."""
    bias, keep, keys, sinks = (squeezed(t) for t in (bias, keep, keys, sinks))
    if windows is not None:
        windows = windows[:, None].float()
        bias = windows if bias is None else bias + windows
    dropout = None if p is None else Dropout(seed, p)
    hides = hidden, fill or 0.0
    return Masking(bias, keep, keys, padded, low, high, *hides, scale, cap, dropout, sinks)


@masked_attention.guard
def _(q, k, v, bias, keep, keys, sinks, windows, low, high, fill, scale, cap, p, hidden, padded):
    if q.dim() == 5 and all(same_sizes(t.shape[:-4], (1,)) for t in (q, k, v)):
        q, k, v, bias, keep, keys, sinks = (squeezed(t) for t in (q, k, v, bias, keep, keys, sinks))
    return (
        reject_shapes(q, k, v, "grouped")
        or reject_dtypes(q=q, k=k, v=v)
        or reject_dynamic(low=low, high=high, fill=fill, scale=scale, cap=cap, p=p)
        or reject_masks(q, k, v, bias, keep)
        or reject_keys(q, k, bias, keys, padded, hidden)
        or reject_sinks(q, sinks)
        or reject_windows(q, k, bias, windows)
        or reject_heads(q, k, v)
        or (Reject(f"the scale {scale:g} is not positive") if scale <= 0 else None)
    )


def reject_heads(q: Tensor, k: Tensor, v: Tensor) -> Reject | None:
    heads, kv_heads = (number(size) for size in (q.shape[1], k.shape[1]))
    for what, size in dict(heads=q.shape[3], values=v.shape[3]).items():
        d = number(size)
        if dynamic(d) or not 16 <= d <= 256:
            return Reject(f"{what} of {d}; the kernel takes 16 to 256")
        if q.dtype == torch.float32 and d > 128:
            return Reject(f"{what} of {d} in fp32 exceed the registers")
    if dynamic(heads) or dynamic(kv_heads) or heads % kv_heads:
        return Reject(f"{heads} heads of q for {kv_heads} of k and v")
    for name, t in dict(q=q, k=k, v=v).items():
        if dynamic(t.stride(3)) or t.stride(3) != 1:
            return Reject(f"the numbers of one head of {name} are {t.stride(3)} apart")
        if statically_known_true(t.numel() == 0):
            return Reject(f"{name} is empty")


def reject_masks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None
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
        if not broadcasts(t, full):
            return Reject(f"{name} with shape {tuple(t.shape)} does not broadcast to {tuple(full)}")
        if t.dtype not in ((torch.bool,) if name == "keep" else DTYPES):
            return Reject(f"{name} is {t.dtype}")


def reject_keys(
    q: Tensor, k: Tensor, bias: Tensor | None, keys: Tensor | None, padded: str, hidden: str
) -> Reject | None:
    if keys is None:
        return None
    if padded == "added":
        full = q.shape[0], 1, 1, k.shape[2]
        if bias is None or keys.dim() == 0 or not broadcasts(keys, full):
            return Reject(f"what is added to the keys, {tuple(keys.shape)}, is no vector over them")
        return reject_dtypes(added=keys)
    if padded == "documents" and hidden == "fill":
        return Reject("blocks of other documents are left out, which a fill would have a part in")
    batches = same_sizes(keys.shape[:1], q.shape[:1]) or same_sizes(keys.shape[:1], (1,))
    fits = same_sizes(keys.shape[-1:], k.shape[2:3])
    if padded == "documents":
        fits = fits and same_sizes(q.shape[2:3], k.shape[2:3]) and keys.dim() <= 2
        if keys.dtype in (torch.int32, torch.int64) and fits and (batches or keys.dim() == 1):
            return None
        return Reject(f"documents are {keys.dtype} with shape {tuple(keys.shape)}")
    if keys.dtype != torch.bool or not batches or not fits:
        return Reject(f"the vector of keys is {keys.dtype} with shape {tuple(keys.shape)}")


def reject_sinks(q: Tensor, sinks: Tensor | None) -> Reject | None:
    if sinks is not None and not broadcasts(sinks, (*q.shape[:3], 1)):
        return Reject(f"sinks of shape {tuple(sinks.shape)} are not one for each row, or fewer")
    return None if sinks is None else reject_dtypes(sinks=sinks)


def reject_windows(
    q: Tensor, k: Tensor, bias: Tensor | None, windows: Tensor | None
) -> Reject | None:
    if windows is None:
        return None
    fits = windows.dim() == 3 and same_sizes(windows.shape[1:], (q.shape[2], k.shape[2]))
    if not fits or not statically_known_true(q.shape[0] % windows.shape[0] == 0):
        return Reject(f"masks of windows of shape {tuple(windows.shape)} do not fit the scores")
    if bias is not None and not all(same_sizes((n,), (1,)) for n in bias.shape[:-3]):
        return Reject("the bias beside masks of windows is not the same for all of them")
    return reject_dtypes(windows=windows)


@masked_attention.worthwhile
def _(q, k, v, bias, keep, sinks, windows, cap, p, padded):
    q, k, v, bias = (squeezed(t) for t in (q, k, v, bias))
    d, alike = number(q.shape[3]), same_sizes(q.shape[3:], v.shape[3:])
    if keep is not None or q.element_size() != 2 or not alike or padded == "added":
        return UNMEASURED
    if d == 32:  # windows of Swin
        others = windows, cap, p
        one = bias is not None and shared(bias) and all(other is None for other in others)
        one = one and short(q, k, v, Masking(sinks=sinks), 64)
        long = all(statically_known_true(t.shape[2] > 32) for t in (q, k))
        timed, least = one and long, 1 << 22
    else:
        timed, least = d == 128 and p is None or d in (64, 128) and cap is None, 1 << 23
    if not timed or statically_known_true(q.numel() < least):
        return UNMEASURED


@masked_attention.kernel(saves=("lse",))
def _(q, k, v, save, **masks):
    out, lse = forward.forward(*map(squeezed, (q, k, v)), masking_of(**masks), save)
    return (out.unsqueeze(0) if q.dim() == 5 else out), lse


@masked_attention.backward(result=True)
def _(saved, do):
    masks = {p.name: getattr(saved, p.name) for p in masked_attention.params[3:]}
    masking, needs = masking_of(**masks), saved.needs
    needs = needs | {"bias": needs["bias"] or needs["windows"]}
    q, k, v, result, do = map(squeezed, (saved.q, saved.k, saved.v, saved.result, do))
    *found, db, dsinks = backward.backward(q, k, v, masking, result, saved.lse, do, needs)
    dbias, dwindows = db, None
    if saved.windows is not None and db is not None:
        trained = saved.needs["bias"]
        summed = db.sum_to_size(squeezed(saved.bias).shape) if trained else None
        dbias = None if summed is None else summed.to(saved.bias.dtype)
        dwindows = db.sum(1).to(saved.windows.dtype) if saved.needs["windows"] else None
    given = saved.q, saved.k, saved.v, saved.bias, saved.sinks
    *found, dbias, dsinks = (
        g.unsqueeze(0) if g is not None and t is not None and t.dim() == 5 else g
        for g, t in zip((*found, dbias, dsinks), given, strict=True)
    )
    return *found, dbias, None, None, None, dsinks, dwindows


@masked_attention.inputs(
    dict(b=2, h=2, n=40, d=16, causal=1), dict(b=32, h=16, n=512, d=64, bias=1)
)
def _(
    tensor, b, h, n, d, e=0, causal=0, window=0, bias=0, sinks=0, windows=0, dense=0, padded=0,
    documents=0, drop=0, added=0,
):  # fmt: skip
    q, k, v = (tensor(b, n, h, size).transpose(1, 2) for size in (d, d, e or d))
    masks = tensor(1, h, n, n) if bias else None, tensor(b, 1, n, n) > 0 if dense else None
    keys = (torch.arange(n, device=q.device) < n // 2).expand(b, n).contiguous() if padded else None
    if documents:
        keys = (torch.arange(n, device=q.device) * documents // n).expand(b, n).contiguous()
    keys = tensor(b, 1, 1, n) if added else keys
    seed = torch.full((1,), 7, device=q.device) if drop else None
    rows = tensor(1, h, 1, 1) if sinks else None
    images = tensor(windows, n, n) if windows else None
    band = 0 if causal or window else None, window - 1 if window else None
    p = 0.1 if drop else None
    keys_are = "documents" if documents else "added" if added else "seen"
    rest = None, d**-0.5, None, p, "zero", keys_are
    return q, k, v, *masks, keys, seed, rows, images, *band, *rest


def reject_shapes(q: Tensor, k: Tensor, v: Tensor, heads: str) -> Reject | None:
    """Shapes that neither the fused kernels of SDPA nor ours take. SDPA would compute the scores in
    memory.
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
    if not same_sizes(q.shape[-1:], k.shape[-1:]):
        return Reject("the heads of q and k differ in size")
