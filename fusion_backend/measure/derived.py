"""Gradients of a region's inputs if some inputs are computed from others."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend.measure.cut import Cut
from fusion_backend.measure.inputs import chain_of, computed


def passed_on(
    cut: Cut, inputs: list[Tensor], gradients: list[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the inputs that want one. An input that is computed from others, such as the
    sum of a bias and a mask, passes its gradient on to them: a replacement may read the others
    instead, and the gradients that reach them are the same.
    """
    made = dict(zip(cut.inputs, inputs, strict=True))
    wanted = [n for n in cut.inputs if made[n].requires_grad]
    found = dict(zip(wanted, gradients, strict=True))
    for a in sorted(found, reverse=True):  # the inputs that are computed last come first
        chain, gradient = chain_of(a, made.keys() - {a}), found[a]
        read = {n for c in chain for n in c.all_input_nodes}
        sources = [n for n in found if n in read]
        if gradient is None or not sources:
            continue
        leaves = {n: made[n].detach().requires_grad_() for n in sources}
        with torch.enable_grad():
            value = computed(chain, cut.device, made | leaves)
        if not value.requires_grad:
            continue
        found[a] = None
        more = torch.autograd.grad(value, [*leaves.values()], gradient, allow_unused=True)
        for n, g in zip(sources, more, strict=True):
            if g is not None:
                found[n] = g if found[n] is None else found[n] + g
    return [*found.values()]
