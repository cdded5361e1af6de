"""What runs by default, and what only `python -m pytest --full` (`make test-all`) runs.

Tests of a product of dimensions (dtype × shape × layout × form) run a covering selection: every
pair of values of two dimensions stands in one combination at least, in which a fault of one
dimension, or of two together, shows. The other combinations carry the mark `full`.
"""

import itertools

import pytest

FULL = False  # set by conftest.py from the option

# Files of many cases that are alike: by default every k-th case of each test function runs, the
# first in any case. What runs less there is run for every pattern by test_every_pattern.py (kernels
# against fp64, in fp32 and bf16, forward and backward) and by tests/graphs (what is recognised).
SAMPLED = {
    "tests/test_attention.py": 2,
    "tests/test_attention_forms.py": 2,
    "tests/test_attention_models.py": 5,
    "tests/test_benchmarks.py": 2,
    "tests/test_channel_kernels.py": 3,
    "tests/test_depth.py": 3,
    "tests/test_dropout.py": 2,
    "tests/test_flash.py": 5,
    "tests/test_flash_dropout.py": 3,
    "tests/test_flash_shapes.py": 3,
    "tests/test_kernels.py": 3,
    "tests/test_linear_cross_entropy.py": 3,
    "tests/test_recognition.py": 6,
    "tests/test_relative_bias.py": 5,
    "tests/test_row_kernels.py": 5,
    "tests/test_scale.py": 3,
    "tests/test_spellings.py": 3,
}


def sampled(names: list[tuple[str, str]]) -> list[bool]:
    """Which tests, each a file and a function of it, run by default."""
    seen: dict[tuple[str, str], int] = {}
    kept = []
    for file, function in names:
        seen[file, function] = seen.get((file, function), -1) + 1
        kept.append(seen[file, function] % SAMPLED.get(file, 1) == 0)
    return kept


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
