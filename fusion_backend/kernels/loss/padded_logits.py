"""Logits in padded rows.

Where the number of classes v is no multiple of 8, rows of v numbers in 16 bits begin at places that
the library's fast products cannot read. Here each row ends with classes that nothing belongs to, as
many as fill its last line of 128 bytes. Their logits are -inf, so that they change neither the loss
nor its gradient, which is 0 there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels.common.inputs import number

ALIGNED, LINE = 16, 128  # bytes: what fast products need, and what is read at a time


def uneven(dtype: torch.dtype, classes: int) -> bool:
    """Do rows of so many classes begin where fast products cannot read?"""
    return classes * dtype.itemsize % ALIGNED != 0


def padding(dtype: torch.dtype, classes: int) -> int:
    """How many classes are added."""
    return -classes % (LINE // dtype.itemsize)


def padded_weight(w: Tensor) -> Tensor:
    """w `[k, v]` transposed, with rows of zeros below: `[v + padding, k]`."""
    return F.pad(w.t(), (0, 0, 0, padding(w.dtype, number(w.shape[1]))))


def padded_logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x w + b of x `[rows, k]`, as `[rows, v + padding]`."""
    v = number(w.shape[1])
    b = w.new_zeros(v) if b is None else b
    b = F.pad(b, (0, padding(w.dtype, v)), value=-math.inf)
    return torch.addmm(b, x, padded_weight(w).t())


def gradient_of_logits(logits: Tensor, rows: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """(softmax - onehot) · scale of the rows that count, else 0, like the logits. In plain torch:
    Inductor writes it over the logits where nobody else needs them, and what stands at the targets
    afterwards.

    rows is what `loss.cross_entropy.forward` keeps, `[2, rows]`; scale is in fp32, one number or
    `[rows]`.
    """
    lse, label = rows[:, :, None]
    counts = lse != math.inf
    if scale.dim():
        scale = torch.where(counts, scale[:, None], 0.0)
    d = torch.exp(logits.float() - lse) * scale
    at = torch.where(counts, (torch.exp(label - lse) - 1.0) * scale, 0.0)
    target = torch.where(counts, target[:, None], 0)
    return d.to(logits.dtype).scatter(1, target, at.to(logits.dtype))
