"""Which tensors an operator writes to, where they are, and how to write to them unseen."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# native_batch_norm and cudnn_batch_norm write to these
UNDECLARED = ("running_mean", "running_var")


def written(op, args: tuple, kwargs: dict) -> list:
    """The arguments that an operator writes to; all of them where it does not say."""
    if not isinstance(op, OpOverload):
        return [*args, *kwargs.values()]
    found = []
    for i, a in enumerate(op._schema.arguments):
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in UNDECLARED:
            found.append(args[i] if i < len(args) else kwargs.get(a.name))
    return found


def place_of(t: torch.Tensor) -> tuple:
    """The memory that a tensor has (its storage first), or the tensor itself where that cannot be
    told (sparse).
    """
    if t.layout != torch.strided:
        return (id(t),)
    return (t.untyped_storage()._cdata, t.dtype, t.storage_offset(), t.shape, t.stride())


def version_of(t: torch.Tensor) -> int | None:
    """How often autograd has seen it written to; inference tensors do not count."""
    return None if t.is_inference() else t._version


def put_back(t: torch.Tensor, content: torch.Tensor, version: int | None) -> None:
    """Write a tensor's old content, and have autograd take it for what it was."""
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        t.copy_(content)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((t,), (version,))
