"""The operators of a sum over ranks.

`fusion_c10d::all_reduce(x, group)` is the sum of every rank's x, as tensor parallelism makes it:
each rank goes on with the whole sum, and the gradient of x is that of the sum. (The gradient of
`_c10d_functional::all_reduce` is summed over the ranks.) It is a composite: autograd and Inductor
see the functional collective. Without torch.distributed there is one rank.

`fusion_c10d::all_reduce_norm` runs the kernels of norm.py. No compiler opens it up: where the
memory of the other ranks is, is known when it runs and not when it is compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_fake

from fusion_backend.compat.distributed import summed
from fusion_backend.kernels.collective import norm
from fusion_backend.kernels.collective.size_gate import takes_two_shots
from fusion_backend.kernels.collective.workspace import group_size
from fusion_backend.kernels.norm.operands import Norm

SPACE = "fusion_c10d"
LIBRARY = Library(SPACE, "DEF")
LIBRARY.define("all_reduce(Tensor x, str group) -> Tensor")
LIBRARY.define(
    "all_reduce_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float offset, "
    "float eps, bool centred, bool save, str group) -> (Tensor, Tensor, Tensor, Tensor)"
)


class SumOverRanks(torch.autograd.Function):
    """The sum; its gradient is passed on as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def all_reduce(x: Tensor, group: str) -> Tensor:
    return SumOverRanks.apply(x, group)


def all_reduce_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, offset: float,
    eps: float, centred: bool, save: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, h, mean and rstd, as norm.all_reduce_norm gives them."""
    two_shot = takes_two_shots(group_size(group), x.numel() * x.element_size())
    of = Norm(weight, bias, offset, eps, centred)
    return norm.all_reduce_norm(x, residual, of, save, group, two_shot)


LIBRARY.impl("all_reduce", all_reduce, "CompositeImplicitAutograd")
LIBRARY.impl("all_reduce_norm", all_reduce_norm, "CUDA")


@register_fake(f"{SPACE}::all_reduce_norm")
def _(x, residual, weight, bias, offset, eps, centred, save, group):
    return norm.fresh(x, Norm(weight, bias, offset, eps, centred), save)


sum_over_ranks = torch.ops.fusion_c10d.all_reduce.default
norm_of_sum = torch.ops.fusion_c10d.all_reduce_norm.default
