"""Relative position bias: rows of a weight selected by an index, as `[h, n, m]`, which attention
adds to its scores.

index is int64 `[n, m]`, or with dimensions of size 1 in front; weight `[rows, h]`. If the index is
proven to be a function of i - j alone, like the buckets of T5, only its first row and column are
read. The gradient is first added up along the diagonals, n + m - 1 sums for each head, and these
sums are added to the rows of the weight. The gradient of a gather instead adds n · m · h numbers to
rows · h addresses, one after another. The sums are in fp32, and have the same bits every time.
Source: Shaw et al. 2018; Raffel et al. 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels.common.inputs import reject_dtypes


def heads_first(x: Tensor) -> Tensor:
    """`[..., n, m, h]` as `[..., h, n, m]`."""
    return x.permute(*range(x.dim() - 3), -1, -3, -2)


@Pattern
def relative_bias(index: Tensor, weight: Tensor) -> Tensor:
    return heads_first(F.embedding(index, weight))


@relative_bias.spelling
def _(index, weight):
    return heads_first(weight[index])


@relative_bias.near_miss
def _(index, weight):
    """keys before queries, as attention does not add it"""
    return F.embedding(index, weight).permute(2, 1, 0)


@relative_bias.near_miss
def _(index, weight):
    """a row without a gradient"""
    return heads_first(F.embedding(index, weight, padding_idx=16))


@relative_bias.replacement(asks={"index": "relative_index"})
def _(index, weight, known):
    """The gradient by diagonals, where the index allows it; the forward is Inductor's
    either way.
    """
    found = known["index"]
    if not found.diagonal:
        return Reject(found.text)
    otherwise = "the gather stays"
    return Replacement(diagonal_bias, (index, weight), {}, found.text, otherwise)


@Op
def diagonal_bias(index: Tensor, weight: Tensor) -> Tensor:
    """The bias for an index whose first row and first column determine it."""
    n, m = index.shape[-2:]
    i, j = torch.arange(n, device=index.device), torch.arange(m, device=index.device)
    table = weight[along(index)]
    return heads_first(table[j - i[:, None] + (n - 1)]).view(
        *index.shape[:-2], weight.shape[1], n, m
    )


def along(index: Tensor) -> Tensor:
    """The index by j - i = 1 - n, ..., m - 1."""
    index = index.reshape(index.shape[-2:])
    n, m = index.shape
    apart = torch.arange(1 - n, m, device=index.device)
    return index[(-apart).clamp(min=0), apart.clamp(min=0)]


@diagonal_bias.guard
def _(index, weight):
    return reject_dtypes(weight=weight)


@diagonal_bias.worthwhile
def _(index, weight, training):
    if not training:
        return Reject("without a gradient Inductor's code is the same")
    few = statically_known_true(index.numel() < 1 << 16)
    if few or not statically_known_true(weight.shape[0] <= 4096):
        return Reject(
            "the sum along diagonals has not been timed for so short an index, or so many rows of "
            "the weight"
        )


# Bytes: d once. Operations: rows · h · (n + m - 1) for the weight.
@diagonal_bias.backward(plain=True)
def _(saved, d):
    n, m = saved.index.shape[-2:]
    rows, h = saved.weight.shape
    i, offset = (torch.arange(size, device=d.device) for size in (n, n + m - 1))
    rows_of_d = F.pad(d.reshape(h, n, m), (n - 1, n - 1))
    diagonals = rows_of_d[:, i[:, None], offset + i[:, None]]  # row i moved i places to the left
    sums = diagonals.sum(1, dtype=torch.promote_types(d.dtype, torch.float32))
    row = along(saved.index)
    row = torch.where(row < 0, row + rows, row)
    its = row == torch.arange(rows, device=d.device)[:, None, None]
    return None, torch.where(its, sums, 0).sum(-1).to(saved.weight.dtype)


@relative_bias.inputs(dict(n=6, m=7, h=4), dict(n=2048, m=2048, h=16))
def _(tensor, n, m, h):
    weight = tensor(32, h)
    apart = torch.arange(m, device=weight.device) - torch.arange(n, device=weight.device)[:, None]
    return apart.clamp(-16, 15) + 16, weight
