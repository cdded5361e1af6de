"""Softmax over the last dimension: softmax(x · scale + mask), or with `fill` where `drop` is set.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; scale, the additive mask, and the
boolean `drop` with its number `fill` may be missing. Masks broadcast. Computed in fp32; a row of
-inf alone is NaN, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import number, reject_dtypes, reject_dynamic, reject_rows
from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.rows import FEW, MAX_HELD, RESULTS, UNMEASURED, reject_broadcast
from fusion_backend.kernels.softmax.backward import backward
from fusion_backend.kernels.softmax.forward import COOPERATIVE, forward


@Pattern(reciprocal=True, inductor="recomputed")
def softmax(
    x: Tensor, scale: float | None, mask: Tensor | None, drop: Tensor | None, fill: float | None
) -> Tensor:
    if (drop is None) != (fill is None) or (mask is not None and drop is not None):
        raise ValueError("one mask at most; drop and fill belong together")
    x = x if scale is None else x * scale
    x = x if mask is None else x + mask
    x = x if drop is None else x.masked_fill(drop, fill)
    return torch.softmax(x, -1)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """another dimension"""
    return torch.softmax(x, 0)


@softmax.near_miss
def _(x, scale, mask, drop, fill):
    """the logarithm of it"""
    return torch.log_softmax(x, -1)


@softmax.guard
def _(x, scale, mask, drop, fill):
    other = drop if mask is None else mask
    return (
        reject_dtypes(x=x, mask=mask)
        or reject_rows(x)
        or reject_larger(x, other)
        or reject_broadcast(x, "mask" if drop is None else "drop", other)
        or reject_dynamic(scale=scale, fill=fill)
    )


def reject_larger(x: Tensor, mask: Tensor | None) -> Reject | None:
    """The kernel expands the mask to x, and not x to the mask."""
    if mask is None:
        return None
    larger = mask.dim() > x.dim() or any(
        statically_known_true(its != 1) and statically_known_true(mine == 1)
        for mine, its in zip(reversed(x.shape), reversed(mask.shape), strict=False)
    )
    if larger:
        return Reject(
            f"x with shape {tuple(x.shape)} is expanded to a mask of shape {tuple(mask.shape)}; "
            "the kernel expands masks, not x"
        )
    if x.dim() > 4:
        return Reject(f"x has {x.dim()} dimensions and a mask; the kernel takes up to 4")
    return None


@softmax.worthwhile
def _(x, scale, mask, drop, fill, training):
    n, masked = number(x.shape[-1]), mask is not None or drop is not None
    if n * x.element_size() > MAX_HELD and (masked or not shareable(x, COOPERATIVE)):
        return Reject(
            "rows of more than 64 KB are read twice: 131072 in fp32 timed at 0.90 of Inductor on "
            "an H200"
        )
    if n < 512 or (masked and statically_known_true(x.numel() < 1 << 26)):
        return UNMEASURED
    many = statically_known_true(x.numel() // n >= FEW)
    if training and many and statically_known_true(x.numel() < 1 << 24):
        return Reject(
            f"Inductor's training step is as fast for small tensors of {FEW} rows and more "
            f"({RESULTS})"
        )


@softmax.kernel
def _(x, scale, mask, drop, fill):
    return forward(x, scale, mask, drop, fill)


@softmax.backward(result=True)
def _(saved, dy):
    needs = saved.needs["x"], saved.mask is not None and saved.needs["mask"]
    dx, ds = backward(dy, saved.result, saved.x, saved.scale, saved.drop, needs)
    return dx, ds.sum_to_size(saved.mask.shape) if needs[1] else None, None


@softmax.inputs(dict(rows=7, n=100), dict(rows=65536, n=2048))
def _(tensor, rows, n):
    return tensor(rows, n), 0.125, tensor(rows, n), tensor(rows, n) > 1, -1e4
