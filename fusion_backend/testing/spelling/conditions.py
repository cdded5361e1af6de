"""Conditions under which a text computes a value. `a` is the Call that is written; `a.self`,
`a.other`, … are its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def tensor(a) -> bool:
    return hasattr(a, "node")


def is_a(a, *names: str) -> bool:
    """Is it a call of one of these that nothing else reads?"""
    return tensor(a) and a.name in names and a.single


def number(a) -> bool:
    return isinstance(a, (int, float)) and not isinstance(a, bool)


def two_tensors(a) -> bool:
    return tensor(a.self) and tensor(a.other)


def overwritable(a) -> bool:
    """May the result overwrite `self`? Nothing else reads it, and it has the result's shape and
    dtype.
    """
    return tensor(a.self) and a.self.fresh and (a.self.shape, a.self.type) == (a.shape, a.type)


def has_inverse(a) -> bool:
    """May division by this number be written as multiplication by its reciprocal?"""
    return number(a.other) and a.other != 0 and (a.reciprocal or abs(math.frexp(a.other)[0]) == 0.5)


def alpha_is_one(a) -> bool:
    return a.alpha == 1


def one_axis(a) -> bool:
    return a.axis is not None


def reduces_as_is(a) -> bool:
    return a.dtype is None and a.axes is not None


def keeps_dims(a) -> bool:
    return reduces_as_is(a) and a.keepdim


def adds_bias(a, *products: str) -> bool:
    """Is it a product plus a vector along its last dimension?"""
    return (
        alpha_is_one(a)
        and is_a(a.self, *products)
        and tensor(a.other)
        and a.other.rank == 1
        and a.self.shape == a.shape
    )


def matrices(a) -> bool:
    return a.self.rank == 2 and a.other.rank == 2


def overwritable_through_view(a) -> bool:
    """May the result overwrite `self` through a view of it?"""
    return overwritable(a) and a.self.contiguous


def last_axis(a) -> bool:
    """Is the one reduced dimension the last?"""
    return one_axis(a) and a.axis in (-1, a.self.rank - 1)


def can_pack(a) -> bool:
    """Is there another product of the same rows, not written yet, whose weight can be concatenated
    with this one's?
    """
    return tensor(a.sibling) and a.sibling.node not in a.writer.text


def is_l2_normalisation(a) -> bool:
    """Is it x / max(|x|, eps) as F.normalize computes it?"""
    norm = a.other.self if is_a(a.other, "expand_as") else None
    return (
        bool(norm)
        and is_a(norm, "clamp_min")
        and is_a(norm.self, "linalg_vector_norm")
        and norm.self.self == a.self
    )


def splits_in_halves(a) -> bool:
    """Are its pieces the two halves of the last dimension?"""
    return a.chunks == 2 and a.dim in (-1, a.self.rank - 1) and a.self.shape[-1] % 2 == 0


def every_other_element(a) -> bool:
    """Does it take every other element of the last dimension?"""
    return (
        a.step == 2
        and a.dim in (-1, a.self.rank - 1)
        and a.self.shape[-1] % 2 == 0
        and a.start in (0, 1)
    )


def pair_on_last_axis(a) -> bool:
    return a.second is not None and a.dim in (-1, a.rank - 1)


def repeats_heads(a) -> bool:
    """Does it repeat the heads of [b, h, n, d]?"""
    return a.rank == 4 and a.dim in (1, -3)


def biased_variance(a) -> bool:
    return a.correction in (0, False) and a.axes is not None


def one_element_a_row(a) -> bool:
    """Does it take one element of each row, along the last dimension?"""
    return a.dim in (-1, a.rank - 1) and a.index.shape == [*a.self.shape[:-1], 1]


def statistics_given(a) -> bool:
    """Is it a batch norm with given statistics?"""
    return tensor(a.running_mean) and not a.training


def statistics_of_batch(a) -> bool:
    """Is it a batch norm with those of the batch, and without running ones?"""
    return bool(a.training) and not tensor(a.running_mean)


def only_if(condition: Callable, *wordings) -> list:
    """Texts, or pairs of a text and its condition, each with one condition more."""
    pairs = (w if isinstance(w, tuple) else (w, lambda a: True) for w in wordings)
    return [(text, lambda a, own=own: condition(a) and own(a)) for text, own in pairs]
