"""Bias, then activation: act(x + b), elementwise, for relu, gelu (exact and tanh), silu, tanh and
exp(relu).

x is `[..., n]`; b broadcasts to it, as a rule `[n]`. The kernel takes a b that runs along one
dimension of x, `[n]` or `[c, 1, 1]`, in fp32, bf16 or fp16, and computes in fp32.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.inputs import memory
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.norm.channels import Affine, forward, reject_channels

Act = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "exp_relu"]


@Pattern(inductor="pointwise")
def bias_act(x: Tensor, b: Tensor, act: Act) -> Tensor:
    return activate(x + b, act)


@bias_act.near_miss
def _(x, b, act):
    """the bias added afterwards"""
    return activate(x, act) + b


@bias_act.near_miss
def _(x, b, act):
    """the bias subtracted twice"""
    return activate(x - 2 * b, act).neg()


def dim_of(x, b) -> int | None:
    """The dimension of x that b runs along, the last where b is a vector; None where there is no
    one such dimension.
    """
    wide = [
        i - b.dim() for i, size in enumerate(b.shape) if not statically_known_true(size == 1)
    ] or [-1]
    if (
        len(wide) > 1
        or not 0 < b.dim() <= x.dim()
        or not statically_known_true(b.shape[wide[0]] == x.shape[wide[0]])
    ):
        return None
    return x.dim() + wide[0]


@bias_act.guard
def _(x, b, act):
    dim = dim_of(x, b)
    if dim is None or not statically_known_true(b.stride(dim - x.dim()) == 1):
        return Reject(
            f"b with {memory(b)} is no vector along one dimension of x with shape {tuple(x.shape)}"
        )
    return reject_dtypes(x=x, b=b) or reject_channels(x, dim)


@bias_act.worthwhile
def _(x, b, act, training):
    if act in ("gelu", "gelu_tanh") and x.element_size() == 2:
        return Reject(
            "Inductor adds the bias and computes the branchless gelu (patterns/gelu.py) in one "
            "kernel"
        )
    return UNMEASURED


@bias_act.kernel
def _(x, b, act):
    return forward(x, dim_of(x, b), Affine(None, None, None, b, 0.0), act)


@bias_act.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), "gelu"
