"""Random programs come out as in eager; those that once failed come first."""

import pytest

from . import random_programs
from .selection import only_full

# Symbolic sizes after a write of a number (two), norms with a rounding in between, and a sum that
# is written to memory which others read.
ONCE_FAILED = [375, 460, 2095, 652]
SEEDS = [*ONCE_FAILED, *range(10, 30), *map(only_full, range(30, 370))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_comes_out_as_in_eager(seed):
    told, _ = random_programs.difference(seed)
    assert not told, random_programs.program(seed)


def test_most_programs_run_and_have_sites():
    found = [random_programs.difference(seed)[1] for seed in range(10, 20)]
    assert sum(n > 0 for n in found) >= 8
