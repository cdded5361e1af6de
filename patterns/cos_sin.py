"""cos(x) or sin(x) of positions, which many kernels read: written to memory once.

Inductor computes an elementwise function again in every kernel that reads it. transformers computes
cos and sin of rotary position embedding in every call of a model, and Inductor computes them again
for each head in each layer, forward and backward: in Llama the kernel that turns the queries takes
2.7 times as long as with cos and sin in memory (docs/performance.md). The op computes the same by
Inductor's own code, and has Inductor write the result. It is used where results that are larger by
far need it, and not where it is in memory in any case, such as for a kernel of ours. It is not
measured: its region would be most of the model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusion_backend import Op, Pattern, Reject, Replacement
from fusion_backend.kernels import dynamic, reject_dtypes
from fusion_backend.kernels.common.in_memory import in_memory, too_few


@Pattern
def cos_sin(x: Tensor, function: Literal["cos", "sin"]) -> Tensor:
    return torch.cos(x) if function == "cos" else torch.sin(x)


@cos_sin.near_miss
def _(x, function):
    """another function"""
    return torch.tan(x)


@cos_sin.neighbours
def _(around, training):
    return too_few(around.computed_again, around.elements)


@cos_sin.replacement
def _(x, function):
    why = "Inductor would compute it again in each kernel that reads it"
    return Replacement(table, (x, function), {}, why, otherwise="it is computed where it is read")


@Op(inductor="inlined")
def table(x: Tensor, function: Literal["cos", "sin"]) -> Tensor:
    """cos(x) or sin(x), in memory."""
    return in_memory(torch.cos(x) if function == "cos" else torch.sin(x))


@table.guard
def _(x, function):
    if any(map(dynamic, (*x.shape, *x.stride()))):
        return Reject("its size is dynamic")
    return reject_dtypes(x=x)


@table.backward(plain=True)
def _(saved, dy):
    return dy * (-torch.sin(saved.x) if saved.function == "cos" else torch.cos(saved.x))


@cos_sin.inputs(dict(n=6, d=8), dict(n=2048, d=64))
def _(tensor, n, d):
    return tensor(n, d), "cos"
