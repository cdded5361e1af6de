"""A pattern that a user writes from docs/write-a-pattern.md alone: an activation of their own, with
a bias.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import Pattern
from fusion_backend.match.templates import templates
from fusion_backend.ops.registry import unregister
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import assert_fuses, check_pattern
from fusion_backend.testing.spelling.recall import recall


@pytest.fixture
def soft_gate():
    @Pattern
    def soft_gate(x: Tensor, b: Tensor) -> Tensor:
        """x · tanh(softplus(x)) of a biased x."""
        y = x + b
        return y * torch.tanh(F.softplus(y))

    yield soft_gate
    unregister("soft_gate")


class Module(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.bias, self.softplus = nn.Parameter(torch.randn(width)), nn.Softplus()

    def forward(self, x):
        x = x + self.bias
        return self.softplus(x).tanh() * x


def in_place(x, b):
    y = b + x
    gate = F.softplus(y).tanh_()
    gate *= y
    return gate


SPELLED = {
    "named": lambda x, b: F.mish(x + b),
    "computed twice": lambda x, b: torch.tanh(F.softplus(x + b)) * (b + x),
    "in place": in_place,
}


@pytest.mark.parametrize("spelled", SPELLED)
def test_recognised(spelled, soft_gate):
    x, b = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert_fuses(SPELLED[spelled], x, b, pattern="soft_gate")


def test_recognised_in_a_module(soft_gate):
    assert_fuses(Module(8), torch.randn(3, 8), pattern="soft_gate")


def test_near_misses(soft_gate):
    x, b = torch.randn(3, 8), torch.randn(8)
    for near in (
        lambda x, b: (x + b) * torch.tanh(F.softplus(x)),
        lambda x, b: (x + b) * torch.tanh(F.softplus(x + b, beta=2.0)),
        lambda x, b: (x + b) * torch.sigmoid(F.softplus(x + b)),
    ):
        assert_fuses(near, x, b, pattern="soft_gate", count=0)


def test_proven_and_spelled_by_the_generator(soft_gate):
    assert check_pattern(soft_gate)
    found = recall(soft_gate, count=12)
    assert not (found.faults or found.unrecognised or found.wrong), found.row()


def test_a_scalar_must_reach_the_graph_as_it_is(scratch):
    @Pattern
    def of_a_sine(x: Tensor, s: float) -> Tensor:
        return torch.tanh(x) * math.sin(s)

    with pytest.raises(PatternError, match="a scalar is computed with before it reaches the graph"):
        templates(of_a_sine)


def test_a_pattern_that_there_is_not_is_no_pattern_that_is_not_found():
    with pytest.raises(ValueError, match="there is no pattern 'soft_gat'; known patterns are "):
        assert_fuses(torch.sin, torch.ones(2), pattern="soft_gat", count=0)
