"""RMS normalisation of each head, then rotary position embedding, as queries and keys have it in
Qwen3 and Gemma 3: n = x / sqrt(mean(x²) + eps) · (weight + offset); y = n · cos + rotate(n) · sin.

x is `[..., heads, length, d]`, weight `[d]`; offset may be missing (Gemma 3: 1). cos and sin are
`[..., d]` and broadcast to x. style says what rotate does: half turns the halves (n1, n2) of the
last dimension into (-n2, n1), interleaved turns neighbours. The kernel takes any mixture of fp32,
bf16 and fp16, x of up to four dimensions and any strides but the last, d even and up to 512, and
cos and sin that all heads share; heads may also stand behind the positions. It computes in fp32 and
rounds once, to the dtype of the reference. The gradients of cos and sin are plain torch.
Sources: Zhang and Sennrich 2019; Su et al. 2021; Qwen3, 2025.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import dynamic, number, reject_dtypes, reject_dynamic, reject_vectors
from fusion_backend.kernels.common.rows import UNMEASURED, reject_broadcast, reject_rows
from fusion_backend.kernels.norm.norm_rotary import MAX_HEAD, forward, heads_axis
from fusion_backend.kernels.norm.norm_rotary_backward import backward


def normalised(x: Tensor, weight: Tensor, offset: float | None, eps: float) -> Tensor:
    """The norm by hand: in memory its result lies as x does, unlike that of F.rms_norm. Like that,
    it takes no integers, to which it would be rounded. Raises ValueError.
    """
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}, which has no norm")
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return h * (weight if offset is None else weight + offset)


def rotated(n: Tensor, style: str) -> Tensor:
    if style == "interleaved":
        return torch.stack((-n[..., 1::2], n[..., ::2]), -1).flatten(-2)
    n1, n2 = n.chunk(2, -1)
    return torch.cat((-n2, n1), -1)


# No `inductor`: a neighbour that Inductor could fuse it with is at most cos and sin, which all
# layers share and which are in memory in any case.
@Pattern
def norm_rotary(
    x: Tensor,
    weight: Tensor,
    offset: float | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    style: Literal["half", "interleaved"],
) -> Tensor:
    n = normalised(x, weight, offset, eps)
    return n * cos + rotated(n, style) * sin


@norm_rotary.spelling
def _(x, weight, offset, eps, cos, sin, style):
    """Normalised before heads and positions change places."""
    n = normalised(x.transpose(-3, -2), weight, offset, eps).transpose(-3, -2)
    return n * cos + rotated(n, style) * sin


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """rotated the other way"""
    n = normalised(x, weight, offset, eps)
    return n * cos - rotated(n, style) * sin


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """the norm over another dimension"""
    n = x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + eps)
    n = n * (weight if offset is None else weight + offset)
    return n * cos + rotated(n, style) * sin


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """the norm of both dimensions of a head"""
    n = x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + eps)
    n = n * (weight if offset is None else weight + offset)
    return n * cos + rotated(n, style) * sin


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """rotated before the norm"""
    return normalised(x * cos + rotated(x, style) * sin, weight, offset, eps)


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """what is rotated is not normalised"""
    return normalised(x, weight, offset, eps) * cos + rotated(x, style) * sin


@norm_rotary.near_miss
def _(x, weight, offset, eps, cos, sin, style):
    """the weight after the rotation"""
    n = normalised(x, torch.ones_like(weight), None, eps)
    y = n * cos + rotated(n, style) * sin
    return y * (weight if offset is None else weight + offset)


@norm_rotary.guard
def _(x, weight, offset, eps, cos, sin, style):
    return (
        reject_head(x)
        or reject_vectors(x.shape[-1], weight=weight)
        or reject_table(x, "cos", cos)
        or reject_table(x, "sin", sin)
        or reject_heads(x, cos, sin)
        or reject_dtypes(x=x)
        or reject_dtypes(weight=weight)
        or reject_dtypes(cos=cos)
        or reject_dtypes(sin=sin)
        or reject_dynamic(offset=offset, eps=eps)
    )


def reject_head(x: Tensor) -> Reject | None:
    """Refuse rows that are no heads of a size that the kernel holds."""
    if refused := reject_rows(x):
        return refused
    if x.dim() > 4:
        return Reject(f"x has {x.dim()} dimensions; the kernel takes up to 4")
    d = number(x.shape[-1])
    if d % 2 or d > MAX_HEAD:
        return Reject(f"a head of {d} is not even or longer than {MAX_HEAD}")


def reject_table(x: Tensor, name: str, table: Tensor) -> Reject | None:
    """Refuse cos and sin that do not broadcast to x, or whose rows are not rows of memory."""
    if refused := reject_broadcast(x, name, table):
        return refused
    width, d = number(table.shape[-1]) if table.dim() else 1, number(x.shape[-1])
    if dynamic(width) or width != d:
        return Reject(f"{name} has {width} columns and a head of x {d}")
    if dynamic(table.stride(-1)) or table.stride(-1) != 1:
        return Reject(f"the elements of a row of {name} are {table.stride(-1)} apart")


def reject_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Reject | None:
    """Refuse cos and sin that heads do not share, and heads whose number may change."""
    axis = heads_axis(x, cos, sin)
    if axis is None:
        return Reject("cos and sin differ from head to head")
    if axis >= -x.dim():
        heads = number(x.shape[axis])
        if dynamic(heads) or heads == 0:
            return Reject("the number of heads is dynamic or 0")


@norm_rotary.worthwhile
def _(x, weight, offset, eps, cos, sin, style, training):
    """Timed at 1.9 to 2.05 times Inductor in training at these sizes. Forward alone, Inductor's own
    code was sometimes a fifth faster than at other times: what it does is measured.
    """
    timed = x.element_size() == 2 and style == "half" and statically_known_true(x.shape[-1] == 128)
    if not (training and timed and statically_known_true(x.numel() >= 1 << 23)):
        return UNMEASURED


@norm_rotary.kernel(saves=("rstd",))
def _(x, weight, offset, eps, cos, sin, style, save):
    return forward(x, weight, offset or 0.0, eps, cos, sin, style, save)


@norm_rotary.saved
def _(x, eps, cos, sin):
    """Operator for operator as in the reference, so that nothing is computed twice."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps).squeeze(-1)
    behind = x.dim() > 2 and heads_axis(x, cos, sin) == -3  # heads follow one another
    return (rstd.transpose(-2, -1) if behind else rstd).reshape(-1)


@norm_rotary.backward
def _(saved, dy):
    needs = saved.needs["x"], saved.needs["weight"]
    dx, dweight = backward(
        dy, saved.x, saved.weight, saved.offset or 0.0, saved.cos, saved.sin, saved.style,
        saved.rstd, needs,
    )  # fmt: skip
    dcos = dsin = None
    if saved.needs["cos"] or saved.needs["sin"]:
        n = normalised(saved.x, saved.weight, saved.offset, saved.eps)
    if saved.needs["cos"]:
        dcos = (dy * n).sum_to_size(saved.cos.shape).to(saved.cos.dtype)
    if saved.needs["sin"]:
        dsin = (dy * rotated(n, saved.style)).sum_to_size(saved.sin.shape).to(saved.sin.dtype)
    return dx, dweight, dcos, dsin


@norm_rotary.inputs(dict(b=2, h=3, n=5, d=12), dict(b=8, h=16, n=1024, d=128, transposed=1))
def _(tensor, b, h, n, d, transposed=0):
    x = tensor(b, n, h, d).transpose(1, 2) if transposed else tensor(b, h, n, d)
    return x, tensor(d), 1.0, 1e-6, tensor(n, d), tensor(n, d), "half"
