"""Questions about sizes and numbers, which may be symbolic. None adds a guard."""

from __future__ import annotations

import torch

from fusion_backend.compat.torch import hinted, statically_known_true


def hashable(value):
    """Non-tensor arguments as part of a key. Symbolic sizes by their expression."""
    if isinstance(value, (list, tuple)):
        return tuple(hashable(v) for v in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return value


def same(a, b) -> bool:
    """Are two shapes known to be equal? Adds no guard."""
    if a is None or len(a) != len(b):
        return False
    return all(map(equals, a, b))


def equals(a, b) -> bool:
    """Are two sizes or numbers known to be equal? Adds no guard."""
    return statically_known_true(a == b)


def is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def nbytes(value: torch.Tensor) -> int:
    """The memory that a tensor takes, with symbolic sizes as in the example; expanded dimensions
    take none. 0 where a size depends on data.
    """
    sizes, strides = hinted(value.shape), hinted(value.stride())
    return 0 if sizes is None or strides is None else span(sizes, strides) * value.element_size()


def span(sizes, strides) -> int:
    """How many elements there are from the first of a tensor to its last."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
