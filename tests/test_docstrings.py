"""The docstrings of the public testing and reporting names show one call each, and it runs."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend
from fusion_backend import Pattern, testing
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.registry import unregister
from fusion_backend.reporting.records import Site
from fusion_backend.reporting.report import Report, report
from fusion_backend.testing.spelling.recall import recall

CONSTANTS = {"FACTOR", "ULPS"}
RESULTS = {"Proof"}  # what check_pattern returns
SHOWN = [getattr(testing, name) for name in testing.__all__ if name not in CONSTANTS | RESULTS]
SHOWN = list(dict.fromkeys([*SHOWN, recall, Report, Site, report]))


def example_of(shown) -> str:
    """The lines of a docstring that are indented more than the others."""
    lines = [line for line in shown.__doc__.splitlines() if line.startswith(" " * 8)]
    return textwrap.dedent("\n".join(lines))


@pytest.fixture
def names():
    """What the examples assume: a model of one input, tensors, and two patterns."""

    @Pattern
    def scaled_tanh(x: Tensor, w: Tensor, s: float) -> Tensor:
        return torch.tanh(x * w) * s

    def model(x):
        return F.layer_norm(x, (8,))

    rms_norm = next(p for p in patterns() if p.name == "rms_norm")
    x, w = (torch.randn(8, requires_grad=True) for _ in range(2))
    kinds = testing.supported_forms(rms_norm)[0]
    yield vars(testing) | dict(
        torch=torch, F=F, fusion_backend=fusion_backend, recall=recall, model=model, x=x, w=w,
        scaled_tanh=scaled_tanh, rms_norm=rms_norm, pattern=rms_norm, kinds=kinds,
        args=testing.arguments(rms_norm, kinds, torch.float32), kernel=torch.tanh,
        reference=torch.tanh,
    )  # fmt: skip
    unregister("scaled_tanh")


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.__name__)
def test_the_example_runs(shown, names):
    code = example_of(shown)
    assert code, f"the docstring of {shown.__name__} shows no call"
    exec(compile(code, f"<docstring of {shown.__name__}>", "exec"), names)
