"""The tensors that an operator writes to, their memory, and writing to them unseen by autograd."""

from __future__ import annotations

import contextlib

import torch
from torch._ops import OpOverload

# native_batch_norm and cudnn_batch_norm write to these, and their schemas do not say so
UNDECLARED = ("running_mean", "running_var")

DATA = torch._C._autograd._get_data_attr  # what Dynamo calls for x.data (2.11 to 2.15)


def written_arguments(op, args: tuple, kwargs: dict) -> list:
    """The arguments that an operator writes to; all arguments where it has no schema."""
    if not isinstance(op, OpOverload):
        return [*args, *kwargs.values()]
    found = []
    for i, a in enumerate(op._schema.arguments):
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in UNDECLARED:
            found.append(args[i] if i < len(args) else kwargs.get(a.name))
    return found


def memory_of(t: torch.Tensor) -> tuple:
    """The memory of a tensor: its storage, then how it lies there. The tensor's identity where it
    has no one storage (sparse).
    """
    if t.layout != torch.strided:
        return (id(t),)
    return (t.untyped_storage()._cdata, t.dtype, t.storage_offset(), t.shape, t.stride())


def base_of(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a tensor is a view of; None for one that is no view."""
    return t._base


def version_of(t: torch.Tensor) -> int | None:
    """How many writes autograd has counted; None for an inference tensor, which has no count."""
    return None if t.is_inference() else t._version


def put_back(t: torch.Tensor, content: torch.Tensor, version: int | None) -> None:
    """Restore a tensor's content and autograd's count of its writes."""
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        t.copy_(content)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def saves_unseen():
    """Inside, no hook of the user's, or of a checkpoint, sees what autograd saves."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # 2.11 to 2.15
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
