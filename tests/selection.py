"""What runs by default, and what only `python -m pytest --full` (`make test-all`) runs.

Tests of a product of dimensions (dtype × shape × layout × form) run a covering selection: every
pair of values of two dimensions stands in one combination at least, in which a fault of one
dimension, or of two together, shows. The other combinations carry the mark `full`.
"""

import itertools

import pytest

FULL = False  # set by conftest.py from the option


def covering(*dimensions, strength: int = 2) -> list[tuple]:
    """Combinations in which every `strength` values of as many dimensions occur together.

    Greedy and without chance: of the product, in its order, always the first combination that has
    most of what is missing.
    """
    product = list(itertools.product(*map(range, map(len, dimensions))))
    axes = list(itertools.combinations(range(len(dimensions)), min(strength, len(dimensions))))

    def parts(combination):
        return {(axis, tuple(combination[i] for i in axis)) for axis in axes}

    missing = set().union(*map(parts, product))
    found = []
    while missing:
        best = max(product, key=lambda c: len(parts(c) & missing))
        missing -= parts(best)
        found.append(best)
    return [tuple(d[i] for d, i in zip(dimensions, c, strict=True)) for c in sorted(found)]


def only_full(*values, **how):
    """A parameter that only `--full` runs."""
    return pytest.param(*values, marks=pytest.mark.full, **how)


def product(strength: int = 2, **dimensions):
    """Parametrize a test with a product: a covering selection of it by default, all with `--full`.

    @product(dtype=[torch.float32, torch.bfloat16], n=[1, 1000])
    def test(dtype, n): ...
    """
    values = [list(d) for d in dimensions.values()]
    indices = [range(len(v)) for v in values]
    chosen = set(covering(*indices, strength=strength))
    combinations = [
        pytest.param(
            *(v[i] for v, i in zip(values, c, strict=True)),
            marks=() if c in chosen else pytest.mark.full,
        )
        for c in itertools.product(*indices)
    ]
    return pytest.mark.parametrize(list(dimensions), combinations)
