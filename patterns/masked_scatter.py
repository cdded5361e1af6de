"""Rows of a tensor replaced where a mask holds: the k-th row that the mask selects becomes the k-th
row of another tensor. Models that read images and text put the features of image patches into the
embedded text this way.

x is `[..., n]`, mask bool `[...]`, source `[..., n]` with as many rows as the mask selects, or
more; the mask is expanded along the rows, as `mask.unsqueeze(-1).expand_as(x)`. torch takes any
mask, and counts the selected elements in front of each element of x. Where the mask selects rows,
the rows are counted here, n times fewer numbers. The gradient of source is gathered: the row of x
that a row of source became is found by bisection. Source: torch.Tensor.masked_scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels.common.inputs import same_sizes
from fusion_backend.kernels.common.launch import assert_all


@Pattern
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return x.masked_scatter(mask.unsqueeze(-1).expand(x.shape), source)


@masked_scatter.near_miss
def _(x, mask, source):
    """where the mask does not hold"""
    return x.masked_scatter(~mask.unsqueeze(-1).expand(x.shape), source)


@masked_scatter.near_miss
def _(x, mask, source):
    """elements, not rows"""
    return x.masked_scatter(mask.unsqueeze(-1) & (x > 0), source)


@masked_scatter.replacement
def _(x, mask, source):
    why = "the mask selects rows, which are counted, not their elements"
    return Replacement(scattered_rows, (x, mask, source), {}, why, "the scatter stays")


@Op
def scattered_rows(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    rows, source = mask.reshape(-1), source.reshape(-1, source.shape[-1])
    counted = torch.cumsum(rows, 0)
    assert_all(counted[-1:] <= source.shape[0], "masked_scatter: source has too few rows")
    place = torch.where(rows, counted - 1, 0).clamp(max=source.shape[0] - 1)
    return torch.where(mask.unsqueeze(-1), source[place].view(x.shape), x)


@scattered_rows.guard
def _(x, mask, source):
    if mask.dtype != torch.bool or not same_sizes(mask.shape, x.shape[:-1]):
        return Reject("the mask is not bool, or has not one element for each row of x")
    if source.dim() < 2 or not same_sizes(source.shape[-1:], x.shape[-1:]):
        return Reject("the rows of source are not as long as those of x")
    if source.dtype != x.dtype:
        return Reject(f"x is {x.dtype} and source is {source.dtype}")
    # row 0 of source is read where the mask does not hold
    if not statically_known_true(source.numel() > 0) or not statically_known_true(x.numel() > 0):
        return Reject("x or source may be empty")


@scattered_rows.worthwhile
def _(x, mask, source, training):
    if not statically_known_true(x.shape[-1] >= 64):
        return Reject("rows of less than 64 elements have not been timed")


# Bytes: dy once, dx and dsource once.
@scattered_rows.backward(plain=True)
def _(saved, dy):
    mask, n = saved.mask.reshape(-1), dy.shape[-1]
    dx = torch.where(saved.mask.unsqueeze(-1), 0, dy) if saved.needs["x"] else None
    if not saved.needs["source"]:
        return dx, None, None
    rows = saved.source.numel() // n
    counted = torch.arange(1, rows + 1, device=dy.device)
    row = torch.searchsorted(torch.cumsum(mask, 0), counted)  # of x, its number of rows if none
    taken = dy.reshape(-1, n)[row.clamp(max=mask.numel() - 1)]
    dsource = torch.where((row < mask.numel()).unsqueeze(-1), taken, 0)
    return dx, None, dsource.view(saved.source.shape)


@masked_scatter.inputs(dict(b=2, s=7, n=6, rows=5), dict(b=16, s=512, n=2048, rows=4096))
def _(tensor, b, s, n, rows):
    """The mask selects as many rows as it says, and source has as many as x."""
    x = tensor(b, s, n)
    places = torch.arange(b * s, device=x.device).view(b, s)
    return x, places * 7919 % (b * s) < rows, tensor(b * s, n)
