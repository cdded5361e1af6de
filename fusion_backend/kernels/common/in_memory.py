"""Values that many kernels read, written to memory once instead of computed in each of them."""

from __future__ import annotations

from fusion_backend.compat.torch import in_memory
from fusion_backend.reporting.reject import Settled

__all__ = ["in_memory", "too_few"]

# Of cos or sin, on an H100: 2^24 elements took 19 µs more than reading it; a launch takes 2 µs.
MANY = 1 << 24
TIMES = 8  # so often each element is computed, at least


def too_few(again: int | None, own: int | None) -> Settled | None:
    """Why a value of so many elements of its `own` stays where it is read: `again` elements are
    computed from it, or None if it is in memory for another reason, or nobody knows.
    """
    if again is None or own is None:
        return Settled("its size is dynamic, or an operator reads it that needs it in memory")
    if again < MANY or again < TIMES * own:
        return Settled(
            f"{again} elements of later results are computed from it, which has {own}: too few to "
            "gain from having it in memory"
        )
    return None
