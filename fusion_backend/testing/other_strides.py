"""The kernels on arguments with other memory layouts than those of `inputs`. A kernel that walks
through memory as if they were contiguous is right on the example inputs, and wrong in a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.ops.op import Op
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing.compare import arguments, in_fp64, unfused
from fusion_backend.testing.proof import Proof

PADDING = 4  # elements after each row


def two_apart(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def padded(t: Tensor) -> Tensor:
    return F.pad(t, (0, PADDING))[..., :-PADDING]


def transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def swapped(t: Tensor) -> Tensor:
    return t.transpose(0, -2).contiguous().transpose(0, -2)


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


# Name -> the same shape with other strides, for tensors with at least this many dimensions.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "elements two apart": (two_apart, 1),
    "padded rows": (padded, 2),
    "transposed matrices": (transposed, 2),
    "leading dimensions swapped": (swapped, 3),
    "expanded tensors": (expanded, 2),
}


def changed(args: list, how: Callable[[Tensor], Tensor], dimensions: int) -> list | None:
    """The arguments with other strides; None where no tensor has so many dimensions."""
    found, any_changed = [], False
    for a in args:
        if isinstance(a, Tensor) and a.dim() >= dimensions and a.numel():
            any_changed = True
            a = how(a.detach()).requires_grad_(a.requires_grad)
        found.append(a)
    return found if any_changed else None


def check_strides(pattern: Op, kinds: tuple, dtype, device: str, compare: Callable, proof: Proof):
    """Compare in each layout that the guard takes; `compare(layout, args, plain, exact)`."""
    taken, refused = [], []
    for words, (how, dimensions) in LAYOUTS.items():
        args = changed(arguments(pattern, kinds, dtype, device), how, dimensions)
        if args is None:
            continue
        answer = pattern.guard_fn(*args) if pattern.guard_fn is not None else None
        if isinstance(answer, Reject):
            refused.append(words)
            continue
        try:
            plain, exact = unfused(pattern, args), unfused(pattern, in_fp64(args))
        except Exception as error:  # the reference may view what cannot be viewed
            why = f"the reference raises {type(error).__name__}"
            proof.not_run.append(f"kernel on {words}: {why}")
            continue
        compare(words, args, plain, exact)
        taken.append(words)
    said = [f"agrees on {', '.join(taken)}"] if taken else []
    said += [f"the guard refuses {', '.join(refused)}"] if refused else []
    if said:
        proof.checked.append(f"kernel on other strides: {'; '.join(said)}")
