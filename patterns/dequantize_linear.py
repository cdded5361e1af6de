"""Linear layer in int8 whose result is scaled back: (q W) · scale · w_scale + b, with the products
summed in int32.

q is `[m, k]` and W `[k, n]` in int8 (a linear layer holds its transpose, as the kernel wants it),
scale `[m, 1]`, `[1]` or a number, w_scale `[n]` or `[1]`, b `[n]` may be missing. The result has
the dtype that torch gives the scaled sum, or is rounded to `dtype`. The sums are not written to
memory. k and n are multiples of 16. Not differentiable with respect to q and W.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels.common.inputs import DTYPES, same_sizes
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.operands import by_output, reject_bias, reject_product


@Pattern
def dequantize_linear(
    q: Tensor,
    w: Tensor,
    scale: Tensor | float,
    w_scale: Tensor,
    b: Tensor | None,
    dtype: Literal["same", "bfloat16", "float16"],
) -> Tensor:
    # exact, as int32 is, on every device
    return scaled_back((q.double() @ w.double()).to(w_scale.dtype), scale, w_scale, b, dtype)


def scaled_back(y, scale, w_scale, b, dtype: str) -> Tensor:
    y = y * scale * w_scale
    y = y if b is None else y + b
    return y if dtype == "same" else y.to(getattr(torch, dtype))


@dequantize_linear.spelling
def _(q, w, scale, w_scale, b, dtype):
    return scaled_back((q.int() @ w.int()).to(w_scale.dtype), scale, w_scale, b, dtype)


@dequantize_linear.near_miss
def _(q, w, scale, w_scale, b, dtype):
    """scaled once only, by the sum of the scales"""
    return (q.int() @ w.int()).to(w_scale.dtype) * (scale + w_scale)


@dequantize_linear.guard
def _(q, w, scale, w_scale, b, dtype):
    refused = reject_product(q, w=w) or reject_bias(w.shape[1], b=b)
    if refused:
        return refused
    if not by_output(w):
        return Reject("w lies in memory by inputs; the tensor cores take int8 weights by outputs")
    if w.shape[1] % 16:
        return Reject(f"{w.shape[1]} results are no multiple of 16")
    for name, t in dict(scale=scale, w_scale=w_scale, b=b).items():
        if isinstance(t, Tensor) and t.dtype not in DTYPES:
            return Reject(f"{name} is {t.dtype}; the kernel takes {', '.join(DTYPES.values())}")
    if q.dim() != 2:
        return Reject(f"q has {q.dim()} dimensions; the kernel takes 2")
    m, n = q.shape[0], w.shape[1]
    if isinstance(scale, Tensor) and not (one(scale) or same_sizes(scale.shape, (m, 1))):
        return Reject(f"scale has shape {tuple(scale.shape)}: neither one number nor one a row")
    if not (one(w_scale) or same_sizes(w_scale.shape, (n,))):
        return Reject(f"w_scale has shape {tuple(w_scale.shape)}: neither one number nor a vector")
    return None


def one(t: Tensor) -> bool:
    """Is it a single number, whatever its dimensions?"""
    return statically_known_true(t.numel() == 1)


@dequantize_linear.worthwhile
def _(q, w, scale, w_scale, b, dtype, training):
    return UNMEASURED


@dequantize_linear.kernel
def _(q, w, scale, w_scale, b, dtype):
    m, n = q.shape[0], w.shape[1]
    row_scale, kind = None, w_scale.dtype
    if isinstance(scale, Tensor):
        row_scale = scale.reshape(-1, 1).expand(m, 1).reshape(m).contiguous()
    else:
        w_scale = w_scale.float() * scale
    for t in (scale, b):
        if isinstance(t, Tensor) and t.dim():  # a number without dimensions promotes nothing
            kind = torch.promote_types(kind, t.dtype)
    kind = kind if dtype == "same" else getattr(torch, dtype)
    column_scale = w_scale.reshape(-1).expand(n).contiguous()
    out, _, _ = linear(
        q, w, b, "identity", row_scale=row_scale, column_scale=column_scale, dtype=kind
    )
    return out


@dequantize_linear.inputs(dict(m=32, k=32, n=16), dict(m=4096, k=4096, n=4096))
def _(tensor, m, k, n):
    q, w = ((tensor(*shape) * 2).to(torch.int8) for shape in ((m, k), (n, k)))
    return q, w.t(), tensor(m, 1), tensor(n), tensor(n), "same"
