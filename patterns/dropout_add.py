"""Dropout, then a residual sum: dropout(x, p) + residual, elementwise. In training only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels.inputs import reject_dtypes, reject_dynamic


@Pattern
def dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True) + residual


@dropout_add.near_miss
def _(x, residual, p):
    """dropout of the sum"""
    return F.dropout(x + residual, p, True)


@dropout_add.guard
def _(x, residual, p):
    return reject_dtypes(x=x, residual=residual) or reject_dynamic(p=p)


@dropout_add.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), 0.1
