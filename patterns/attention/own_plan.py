"""Attention in training that shares no plan of cuDNN with other attention of its process.

`compat/attention_plans.py` says how torch confuses plans. Written-out attention meets this as soon
as two versions of it run in one process: Inductor copies the gradient of the result before its
call, and the call that a site becomes here reads it where it lies.

Batch and heads of attention mean the same. `sdpa_of_own_plan` hands them over in exchange: views,
whose strides other code does not use. The gradient of its result lies in memory token by token, so
that its own calls agree. cuDNN takes 16 bits; in fp32 the call is the usual one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

HALVES = (torch.float16, torch.bfloat16)
MOST = 1 << 16  # the kernels of SDPA take fewer heads

library = torch.library.Library("fusion", "FRAGMENT")
library.define(
    "sdpa_of_own_plan(Tensor q, Tensor k, Tensor v, *, float dropout_p, bool is_causal, "
    "float scale) -> Tensor"
)


class TokenByToken(torch.autograd.Function):
    """The result of attention, `[heads, batch, tokens, size]`, whose gradient lies in memory as
    `[batch, tokens, heads, size]`.
    """

    @staticmethod
    def forward(ctx, result: Tensor):
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """`F.scaled_dot_product_attention` of `[batch, heads, tokens, size]`; heads of k and v are as
    many as those of q.
    """
    half = q.dtype in HALVES or torch.is_autocast_enabled(q.device.type)
    if not half or not guard_or_true(q.shape[0] < MOST):
        return F.scaled_dot_product_attention(q, k, v, **options)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    result = F.scaled_dot_product_attention(q, k, v, **options)
    return TokenByToken.apply(result).transpose(0, 1)


library.impl("sdpa_of_own_plan", sdpa, "CompositeImplicitAutograd")
sdpa_of_own_plan = torch.ops.fusion.sdpa_of_own_plan.default
