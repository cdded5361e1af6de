"""What a covering selection covers, and what the shortcuts of the tests leave as it is."""

import itertools
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.nn.functional as F

from . import selection
from .eager_kernels import eager_kernels
from .selection import (
    LEFT_OUT,
    SAMPLED,
    covering,
    covering_some,
    forms_by_default,
    left_out,
    product,
    sampled,
)


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


def test_of_combinations_that_exist_every_pair_is_covered():
    """Of a pattern's forms: where an argument is missing, so are others."""
    forms = [f for f in itertools.product("ab", "cd", "ef", "gh") if f[0] == "a" or f[1] == "c"]
    found = covering_some(forms)
    assert found[0] == forms[0] and found == [f for f in forms if f in found]
    assert len(found) < len(forms) / 2
    for some in itertools.combinations(range(4), 2):
        of = [{tuple(f[axis] for axis in some) for f in fs} for fs in (forms, found)]
        assert of[0] == of[1]
    assert covering_some([]) == [] and covering_some([("a",)]) == [("a",)]


def test_all_forms_run_in_full(monkeypatch):
    forms = list(itertools.product("ab", "cd", "ef"))
    monkeypatch.setattr(selection, "FULL", False)
    assert len(forms_by_default(forms)) == 2
    monkeypatch.setattr(selection, "FULL", True)
    assert forms_by_default(forms) == forms


def test_what_is_left_out_is_there():
    """A test of that name, and its case among what the file names; and why it may be left out."""
    for node, instead in LEFT_OUT.items():
        file, _, rest = node.partition("::")
        function, _, case = rest.partition("[")
        text = (Path(__file__).parent.parent / file).read_text()
        assert f"def {function}(" in text and case.removesuffix("]") in text, node
        assert instead and left_out(node) and left_out(f"{node}[x]") == (not case)


def test_of_a_file_of_many_cases_every_third_runs():
    file, other = next(path for path, k in SAMPLED.items() if k == 3), "tests/test_backend.py"
    names = [(file, "a")] * 4 + [(file, "b")] + [(other, "a")] * 2
    assert sampled(names) == [True, False, False, True, True, True, True]
    files = (path.partition("::")[0] for path in SAMPLED)
    assert all((Path(__file__).parent.parent / path).exists() for path in files)


def test_a_function_may_have_a_sample_of_its_own(monkeypatch):
    monkeypatch.setitem(SAMPLED, "tests/test_a.py", 3)
    monkeypatch.setitem(SAMPLED, "tests/test_a.py::f", 2)
    names = [("tests/test_a.py", function) for function in "fgfgfgfg"]
    assert sampled(names) == [True, True, False, False, True, False, False, True]
