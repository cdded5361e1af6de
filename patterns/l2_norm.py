"""Rows of unit length: x / max(‖x‖, eps), over the last dimension; without eps, x / ‖x‖.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; the sum of squares is taken in
fp32. Backward keeps x alone. Source: torch.nn.functional.normalize.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import number, reject_dtypes, reject_dynamic, reject_rows
from fusion_backend.kernels.common.rows import RESULTS, UNMEASURED
from fusion_backend.kernels.norm.l2_norm import backward, forward


@Pattern(inductor="reduction")
def l2_norm(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return F.normalize(x, dim=-1, eps=eps)


@l2_norm.near_miss
def _(x, eps):
    """eps added, not a lower bound"""
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + (0.1 if eps is None else eps))


@l2_norm.near_miss
def _(x, eps):
    """the norm of another order"""
    return x / torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True).clamp_min(
        0.0 if eps is None else eps
    )


@l2_norm.guard
def _(x, eps):
    return reject_dtypes(x=x) or reject_rows(x) or reject_dynamic(eps=eps)


@l2_norm.worthwhile
def _(x, eps, training):
    if x.element_size() == 4:
        return Reject("in fp32 it is Inductor's: timed at 0.97 of Inductor on an H200")
    if number(x.shape[-1]) > 4096:
        return Reject(f"Inductor is as fast for rows of more than 4096 ({RESULTS})")
    if statically_known_true(x.numel() < 1 << 24):
        return UNMEASURED


@l2_norm.kernel
def _(x, eps):
    return forward(x, eps)


@l2_norm.backward
def _(saved, dy):
    return backward(dy, saved.x, saved.eps)


@l2_norm.inputs(dict(rows=7, n=100), dict(rows=65536, n=1024))
def _(tensor, rows, n):
    return tensor(rows, n), 1e-12
