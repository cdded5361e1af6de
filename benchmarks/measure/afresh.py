"""The backend as a process finds it that has compiled nothing."""

from __future__ import annotations

import fusion_backend
from fusion_backend.measure.allowance import ALLOWANCE


def as_a_program_of_its_own() -> None:
    """Each row has the whole of fusion.measure_s, and a report of nothing but itself."""
    fusion_backend.reset()
    ALLOWANCE.took.clear()
