"""`fusion_c10d::all_reduce_norm`, which runs the kernels of norm.py.

No compiler opens it up: where the memory of the other ranks is, is known when it runs and not when
it is compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from fusion_backend.compat.sums_over_ranks import (  # noqa: F401 (the last is for rooms)
    LIBRARY,
    SPACE,
    sum_over_ranks,
)
from fusion_backend.kernels.collective import norm
from fusion_backend.kernels.collective.size_gate import takes_two_shots
from fusion_backend.kernels.collective.workspace import group_size, pretended
from fusion_backend.kernels.common.launch import TRIAL
from fusion_backend.kernels.norm.operands import Norm

LIBRARY.define(
    "all_reduce_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float offset, "
    "float eps, bool centred, bool save, str group) -> (Tensor, Tensor, Tensor, Tensor)"
)


def all_reduce_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, offset: float,
    eps: float, centred: bool, save: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, h, mean and rstd, as norm.all_reduce_norm gives them."""
    two_shot = takes_two_shots(group_size(group), x.numel() * x.element_size())
    of = Norm(weight, bias, offset, eps, centred)
    return norm.all_reduce_norm(x, residual, of, save, group, two_shot)


LIBRARY.impl("all_reduce_norm", all_reduce_norm, "CUDA")


@register_fake(f"{SPACE}::all_reduce_norm")
def _(x, residual, weight, bias, offset, eps, centred, save, group):
    return norm.fresh(x, Norm(weight, bias, offset, eps, centred), save)


norm_of_sum = torch.ops.fusion_c10d.all_reduce_norm.default


def tried(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, offset: float,
    eps: float, centred: bool, save: bool, group: str,
) -> None:  # fmt: skip
    """In a trial the kernel is compiled, as it will be launched; nowhere else anything happens."""
    if TRIAL.get() is not None:
        of, place = Norm(weight, bias, offset, eps, centred), pretended(x, group)
        two_shot = takes_two_shots(place.world, x.numel() * x.element_size())
        norm.start(x, residual, of, norm.fresh(x, of, save), place, two_shot)
