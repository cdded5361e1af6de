"""What a covering selection covers, and what the shortcuts of the tests leave as it is."""

import itertools
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.nn.functional as F

from .eager_kernels import eager_kernels
from .selection import SAMPLED, covering, product, sampled


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (7, 3, 3), (6, 2, 5, 3), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_pair_is_covered(sizes, strength):
    dimensions = [[f"{axis}{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    found = covering(*dimensions, strength=strength)
    for some in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        seen = {tuple(c[axis] for axis in some) for c in found}
        assert seen == set(itertools.product(*(dimensions[axis] for axis in some)))
    assert len(found) == len(set(found)) <= len(list(itertools.product(*dimensions)))
    assert found == covering(*dimensions, strength=strength), "without chance"


def test_pairs_need_few_combinations():
    dimensions = [range(6), range(2), range(5), range(3)]
    assert 30 <= len(covering(*dimensions)) <= 36  # of 180


def test_the_rest_is_marked():
    """Nothing of the product is lost, and values need neither a hash nor an equality."""
    (parameters,) = [product(x=[[], {}, torch.ones(2)], y=[0, 1], z=[0, 1]).mark.args[1]]
    assert len(parameters) == 12
    default = [p.values for p in parameters if not p.marks]
    assert len(default) == 6 and [p.values[1:] for p in parameters[:4]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_eager_kernels_end_where_inductor_begins(monkeypatch):
    """Graphs, their saved tensors and gradients are there; code is not generated."""

    def generate(*args, **kwargs):
        raise AssertionError("Inductor generates code")

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", generate)
    x, graphs = torch.randn(4, 8, requires_grad=True), []
    with eager_kernels(lambda gm, options: graphs.append(bool(options.get("is_backward")))):
        y = torch.compile(lambda x: F.layer_norm(x, (8,)).sin(), backend="inductor")(x)
        (found,) = torch.autograd.grad(y.sum(), x)
    assert graphs == [False, True]
    (want,) = torch.autograd.grad(F.layer_norm(x, (8,)).sin().sum(), x)
    torch.testing.assert_close(found, want)
    torch.compiler.reset()
    with pytest.raises(Exception, match="Inductor generates code"):
        torch.compile(lambda x: F.layer_norm(x, (8,)).sin(), backend="inductor")(x)


def test_of_a_file_of_many_cases_every_third_runs():
    file, other = next(path for path, k in SAMPLED.items() if k == 3), "tests/test_backend.py"
    names = [(file, "a")] * 4 + [(file, "b")] + [(other, "a")] * 2
    assert sampled(names) == [True, False, False, True, True, True, True]
    assert all((Path(__file__).parent.parent / path).exists() for path in SAMPLED)
