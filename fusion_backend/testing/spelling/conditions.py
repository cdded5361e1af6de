"""Conditions under which a text computes a value: `a` is the call that is written, `a.other` one of
its arguments.
"""

from __future__ import annotations

import math


def tensor(a) -> bool:
    return hasattr(a, "node")


def is_a(a, *names: str) -> bool:
    """A call of one of these that nobody else reads."""
    return tensor(a) and a.name in names and a.single


def number(a) -> bool:
    return isinstance(a, (int, float)) and not isinstance(a, bool)


def both(a) -> bool:
    return tensor(a.self) and tensor(a.other)


def own(a) -> bool:
    """May the result be written over `self`: nobody else reads it, and it has the result's shape
    and dtype.
    """
    return tensor(a.self) and a.self.fresh and (a.self.shape, a.self.type) == (a.shape, a.type)


def invertible(a) -> bool:
    """Division by this number may be written as multiplication by its reciprocal."""
    return number(a.other) and a.other != 0 and (a.reciprocal or abs(math.frexp(a.other)[0]) == 0.5)


def plain(a) -> bool:
    return a.alpha == 1


def one_axis(a) -> bool:
    return a.axis is not None


def reduces(a) -> bool:
    return a.dtype is None and a.axes is not None


def kept(a) -> bool:
    return reduces(a) and a.keepdim


def bias_of(a, *products: str) -> bool:
    """A product plus a vector that goes along its last dimension."""
    return (
        plain(a)
        and is_a(a.self, *products)
        and tensor(a.other)
        and a.other.rank == 1
        and a.self.shape == a.shape
    )


def matrices(a) -> bool:
    return a.self.rank == 2 and a.other.rank == 2


def dense(a) -> bool:
    """May the result be written over `self` through a view of it?"""
    return own(a) and a.self.contiguous


def floating(a) -> bool:
    return a.floating


def last_axis(a) -> bool:
    """The one reduced dimension is the last."""
    return one_axis(a) and a.axis in (-1, a.self.rank - 1)


def packs(a) -> bool:
    """Is there another product of the same rows, not written yet, whose weight can stand beside
    this one's?
    """
    return tensor(a.sibling) and a.sibling.node not in a.author.text


def normalises(a) -> bool:
    """Is it x / max(|x|, eps), as F.normalize writes it?"""
    norm = a.other.self if is_a(a.other, "expand_as") else None
    return (
        bool(norm)
        and is_a(norm, "clamp_min")
        and is_a(norm.self, "linalg_vector_norm")
        and norm.self.self == a.self
    )


def halves(a) -> bool:
    """Are its pieces the two halves of the last dimension?"""
    return a.chunks == 2 and a.dim in (-1, a.self.rank - 1) and a.self.shape[-1] % 2 == 0


def strided(a) -> bool:
    """Every other element of the last dimension."""
    return (
        a.step == 2
        and a.dim in (-1, a.self.rank - 1)
        and a.self.shape[-1] % 2 == 0
        and a.start in (0, 1)
    )


def pair(a) -> bool:
    return a.second is not None and a.dim in (-1, a.rank - 1)


def heads(a) -> bool:
    """Heads repeated in [b, h, n, d]."""
    return a.rank == 4 and a.dim in (1, -3)


def unbiased(a) -> bool:
    return a.correction in (0, False) and a.axes is not None
