"""Random programs come out as in eager."""

import pytest

from . import random_programs
from .selection import only_full

SEEDS = [*range(24), *map(only_full, range(24, 370))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_comes_out_as_in_eager(seed):
    told, _ = random_programs.difference(seed)
    assert not told, random_programs.program(seed)


def test_most_programs_run_and_have_sites():
    found = [random_programs.difference(seed)[1] for seed in range(10)]
    assert sum(n > 0 for n in found) >= 8
