"""What a fault is."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str  # stands once in the file
    new: str
    tests: str  # arguments of pytest
