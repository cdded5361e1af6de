"""Questions about sizes and numbers, which may be symbolic. None adds a guard."""

from __future__ import annotations

import torch

from fusion_backend.compat.torch import statically_known_true


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
