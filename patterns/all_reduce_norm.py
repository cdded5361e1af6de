"""The all-reduce of a process group, the residual sum and a normalisation, which end a block of a
tensor-parallel model: h = sum of all x + residual, or without a residual; then h /
sqrt(mean(h²) + eps) · (weight + offset), or (h - mean) / sqrt(var + eps) · weight + bias.

x and residual are `[..., n]` of one shape in fp32, bf16 or fp16, with rows of up to 16384, weight
and bias `[n]`; offset and bias may be missing. Returns the normalised value and h, computed in fp32
and rounded once. Over more than two ranks h is rounded before it is normalised if x is large
(kernels/collective/norm.py). The gradient of x is that of h, because every rank has all of h.

The ranks read each other's memory (torch.distributed._symmetric_memory). If they cannot, NCCL or
the group's other backend computes the sum, and the smaller patterns may take the operators after
it.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Op, Reject, Replacement, Rule
from fusion_backend.kernels import (
    reject_dtypes,
    reject_dynamic,
    reject_rows,
    reject_shapes,
    reject_vectors,
)
from fusion_backend.kernels.collective.norm import MAX_ROW
from fusion_backend.kernels.collective.operators import norm_of_sum, sum_over_ranks, tried
from fusion_backend.kernels.collective.reach import linked, out_of_reach, ranks_of, unsupported
from fusion_backend.kernels.collective.size_gate import other_gpus, reject_size, untimed
from fusion_backend.kernels.norm.backward import backward
from fusion_backend.kernels.norm.operands import Norm


@Op(group="group")
def all_reduce_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    offset: float | None,
    eps: float,
    kind: Literal["rms", "layer"],
    group: str,
) -> tuple[Tensor, Tensor]:
    """The op that replaces both patterns."""
    h = sum_over_ranks(x, group)
    h = h if residual is None else h + residual
    if kind == "layer":
        return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h
    y = F.rms_norm(h, h.shape[-1:], None, eps)
    return y * (weight if offset is None else weight + offset), h


@all_reduce_norm.guard
def _(x, residual, weight, bias, offset, eps):
    rest = {} if residual is None else {"residual": residual}
    long = x.shape[-1] > MAX_ROW
    return (
        reject_rows(x)
        or (Reject(f"a row is longer than {MAX_ROW}") if long else None)
        or reject_shapes(x=x, **rest)
        or reject_vectors(x.shape[-1], weight=weight, bias=bias)
        or reject_dtypes(x=x, weight=weight, bias=bias, **rest)
        or reject_dynamic(offset=offset, eps=eps)
        or reject_size(x)
    )


@all_reduce_norm.worthwhile
def _(x, residual, kind, group, training):
    world = ranks_of(group)
    refused = untimed(x, residual, kind, world, training)
    if refused is not None or out_of_reach(group):  # which is asked at last, and says why
        return refused
    return other_gpus(linked(group), world)


@all_reduce_norm.kernel(saves=("mean", "rstd"))
def _(x, residual, weight, bias, offset, eps, kind, group, save):
    given = (x, residual, weight, bias, offset or 0.0, eps, kind == "layer", save, group)
    tried(*given)
    return norm_of_sum(*given)


@all_reduce_norm.backward(result=True, same={"residual": "x"})
def _(saved, dy, dh=None):
    centred = saved.kind == "layer"
    norm = Norm(saved.weight, saved.bias, saved.offset, saved.eps, centred)
    needs = [saved.needs[name] for name in ("x", "weight", "bias")]
    d, dweight, dbias = backward(dy, dh, saved.result[1], saved.mean, saved.rstd, norm, needs)
    return d, None, dweight, dbias


@all_reduce_norm.inputs(dict(rows=7, n=100), dict(rows=64, n=4096))
def _(tensor, rows, n, layer=0):
    given = tensor(rows, n), tensor(rows, n), tensor(n)
    rest = (tensor(n), None, 1e-5, "layer") if layer else (None, 1.0, 1e-6, "rms")
    return *given, *rest, "the group"


LEFT = "the sum over ranks is left to the process group"


def replaced(group: str, *arguments) -> Replacement | Reject:
    """The op, where the ranks can reach each other's memory: one answer for all of them."""
    if why := unsupported(group):
        return Reject(f"{LEFT}: {why}")

    def reached() -> Reject | None:
        why = out_of_reach(group)
        return Reject(why) if why else None

    said = "one kernel with the norm"
    return Replacement(all_reduce_norm, (*arguments, group), {}, said, LEFT, reached)


@Rule
def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, offset: float | None, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    h = sum_over_ranks(x, group)
    h = h if residual is None else h + residual
    y = F.rms_norm(h, h.shape[-1:], None, eps)
    return y * (weight if offset is None else weight + offset), h


@all_reduce_add_rms_norm.near_miss
def _(x, residual, weight, offset, eps, group):
    """half of the sum"""
    h = sum_over_ranks(x, group) * 0.5
    h = h if residual is None else h + residual
    y = F.rms_norm(h, h.shape[-1:], None, eps)
    return y * (weight if offset is None else weight + offset), h


@all_reduce_add_rms_norm.replacement
def _(x, residual, weight, offset, eps, group):
    return replaced(group, x, residual, weight, None, offset, eps, "rms")


@all_reduce_add_rms_norm.inputs(dict(rows=7, n=100), dict(rows=64, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), 1.0, 1e-6, "the group"


@Rule
def all_reduce_add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    h = sum_over_ranks(x, group)
    h = h if residual is None else h + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@all_reduce_add_layer_norm.near_miss
def _(x, residual, weight, bias, eps, group):
    """half of the sum"""
    h = sum_over_ranks(x, group) * 0.5
    h = h if residual is None else h + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


@all_reduce_add_layer_norm.replacement
def _(x, residual, weight, bias, eps, group):
    return replaced(group, x, residual, weight, bias, None, eps, "layer")


@all_reduce_add_layer_norm.inputs(dict(rows=7, n=100), dict(rows=64, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(rows, n), tensor(n), tensor(n), 1e-5, "the group"
