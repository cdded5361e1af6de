"""Linear layer, then activation: act(x W + b), for relu, squared relu, gelu (exact, tanh and
quick), silu, sigmoid and tanh.

x is `[..., k]`, W `[k, n]` with dense rows or columns (nn.Linear holds its transpose), b `[n]` may
be missing. bf16, fp16, or fp32 with TF32; sums in fp32, rounded once. Where tiles have finishers
(kernels/gemm/tiles.py), which is on Hopper, the products are rounded as well, before b is added.
Rows begin at multiples of 16 bytes. relu and the tanh form of gelu are an epilogue of the library's
product, too, which is taken where b is given, x has more than 16 rows, and no tile of ours is known
to be faster. The gradient reads the result, or x W, which is kept.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.kernels import reject_dtypes
from fusion_backend.kernels.common.activations import activate, activation_gradient
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.decode import FEW, FEWER, decode, is_few
from fusion_backend.kernels.gemm.gradients import linear_gradients
from fusion_backend.kernels.gemm.library import library_linear, library_takes
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.operands import reject_bias, reject_precision, reject_product
from fusion_backend.kernels.gemm.tiles import are_many

Act = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh"]
BY_RESULT = ("relu", "sigmoid", "tanh")  # their gradient needs no more than the result


@Pattern
def linear_act(x: Tensor, w: Tensor, b: Tensor | None, act: Act) -> Tensor:
    y = x @ w
    return activate(y if b is None else y + b, act)


@linear_act.near_miss
def _(x, w, b, act):
    """the bias added afterwards"""
    y = activate(x, act) @ w
    return y if b is None else y + b


@linear_act.guard
def _(x, w, b, act):
    return (
        reject_dtypes(x=x, w=w, b=b)
        or reject_precision(x)
        or reject_product(x, w=w)
        or reject_bias(w.shape[1], b=b)
    )


@linear_act.worthwhile
def _(x, w, b, act, training):
    if training or act not in ("relu", "gelu", "gelu_tanh") or not are_many(x):
        return UNMEASURED
    return None


@linear_act.kernel(saves=("pre",))
def _(x, w, b, act, save):
    save = save and act not in BY_RESULT
    if not save:
        library = library_takes(x, w, b, act)
        if is_few(math.prod(x.shape[:-1]), FEWER if library else FEW):
            return decode(x, w, b, act), x.new_empty(0)
        if library:
            return library_linear(x, w, b, act), x.new_empty(0)
    out, pre, _ = linear(x, w, b, act, save=(save, False))
    return out, pre


@linear_act.saved
def _(x, w, b, act):
    return x.new_empty(0) if act in BY_RESULT else x @ w


@linear_act.backward(plain=True, result=True)
def _(saved, dy):
    dy, y, act = dy.float(), saved.result.float(), saved.act
    if act == "relu":
        d = torch.where(y <= 0, 0.0, dy)
    elif act == "sigmoid":
        d = dy * y * (1 - y)
    elif act == "tanh":
        d = dy * (1 - y * y)
    else:
        pre = saved.pre.float() if saved.b is None else saved.pre.float() + saved.b.float()
        d = activation_gradient(dy, pre, act, saved.x.element_size() == 2)
    needs = tuple(saved.needs[name] for name in ("x", "w", "b"))
    return linear_gradients(d, saved.x, saved.w, saved.b, needs)


@linear_act.inputs(dict(m=5, k=48, n=24), dict(m=16384, k=1024, n=4096))
def _(tensor, m, k, n, tanh=0, relu=0):
    return (
        tensor(m, k),
        tensor(k, n),
        tensor(n),
        "relu" if relu else "gelu_tanh" if tanh else "gelu",
    )
