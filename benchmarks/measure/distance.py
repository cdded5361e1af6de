"""The distance of tensors, and of whole model outputs, from exact results."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fusion_backend.compat.torch import pytree

PIECE = 1 << 27  # elements


def distance(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact| in fp64, Euclidean norms."""
    return joint_distance({"": got}, {"": exact})


def joint_distance(got: dict[object, Tensor], exact: dict[object, Tensor]) -> float:
    """The distance of several tensors taken as one long vector (all the gradients of a model).
    ValueError where there are others, or of other shapes. Summed up a piece at a time: logits are
    large.
    """
    if got.keys() != exact.keys():
        raise ValueError(f"different tensors: {sorted(got.keys() ^ exact.keys())[:4]} ...")
    off = norm = 0.0
    for g, e in ((got[name], exact[name]) for name in exact):
        if g.shape != e.shape:
            raise ValueError(
                f"a tensor of shape {tuple(g.shape)}, in the exact run {tuple(e.shape)}"
            )
        for part, true in zip(g.reshape(-1).split(PIECE), e.reshape(-1).split(PIECE), strict=True):
            off += (part.double() - true.double()).square().sum().item()
            norm += true.double().square().sum().item()
    return (off / (norm or 1.0)) ** 0.5


def floats(output: object) -> dict[int, Tensor]:
    """The floating tensors of an output, which may be a dataclass, in order."""
    leaves = pytree.tree_leaves(output)
    while any(dataclasses.is_dataclass(x) for x in leaves):
        leaves = pytree.tree_leaves([vars(x) if dataclasses.is_dataclass(x) else x for x in leaves])
    found = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not found:
        raise ValueError(f"the output has no floating tensor to compare: {type(output).__name__}")
    return dict(enumerate(found))
