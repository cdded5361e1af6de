"""Patterns that want the same place, and patterns that cannot be: who wins, and what is said."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, explain
from fusion_backend.frontends.loading import patterns
from fusion_backend.match.templates import templates
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import check_pattern, rewritten


def told(fn, *inputs):
    report = explain(fn, *inputs, options={"fusion.gate": "always"})
    return {s.pattern: (s.fused, s.reason) for s in report.sites}


def test_the_larger_wins_and_both_are_shown(scratch):
    @Pattern
    def sine_of_cosine(x: Tensor) -> Tensor:
        return torch.cos(x).sin()

    @Pattern
    def sine_of_cosine_of_tan(x: Tensor) -> Tensor:
        return torch.tan(x).cos().sin()

    sites = told(lambda x: x.tan().cos().sin(), torch.randn(4))
    assert sites["sine_of_cosine_of_tan"][0]
    assert sites["sine_of_cosine"] == (False, "overlaps sine_of_cosine_of_tan, which is larger")


def test_of_equals_the_first_registered_wins_and_both_are_shown(scratch):
    @Pattern
    def written_first(x: Tensor) -> Tensor:
        return torch.tan(x).cos()

    @Pattern
    def written_second(x: Tensor) -> Tensor:
        return torch.tan(x).cos()

    sites = told(lambda x: x.tan().cos(), torch.randn(4))
    assert sites["written_first"][0]
    assert sites["written_second"] == (
        False,
        "overlaps written_first, which is as large and was registered first",
    )


def test_an_argument_that_comes_too_late_is_named_with_its_line(scratch):
    @Pattern
    def both_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.cos(x)
        return a, a.sin() * y

    def in_time(x, w):
        y = w.tan()
        a = x.cos()
        return a, a.sin() * y

    def late(x, w):
        a = x.cos()
        y = w.tan()
        return a, a.sin() * y

    given = torch.randn(4), torch.randn(4)
    assert told(in_time, *given)["both_results"][0]
    line = late.__code__.co_firstlineno + 2
    assert told(late, *given)["both_results"] == (
        False,
        f"its argument, the result of tan at {__file__}:{line}, is computed after its first result",
    )


def test_an_overlap_in_the_middle(scratch):
    @Pattern
    def upper(x: Tensor) -> Tensor:
        return torch.cos(x).sin().exp()

    @Pattern
    def lower(x: Tensor) -> Tensor:
        return torch.tan(x).cos()

    sites = told(lambda x: x.tan().cos().sin().exp(), torch.randn(4))
    assert sites["upper"][0]
    assert sites["lower"] == (False, "overlaps upper, which is larger")


def test_what_a_larger_one_covers_does_not_count_as_left_out():
    report = explain(
        lambda x, y: ((x + y) * 1.5).exp(), *torch.randn(2, 4), options={"fusion.gate": "always"}
    )
    assert [(s.pattern, s.covered) for s in report.sites] == [
        ("add_mul_exp", False),
        ("add_mul", True),
    ]
    assert "1 of 1 recognised sites fused" in str(report)


def test_nothing_is_found_in_what_was_written(scratch):
    """A replacement is never matched again, not even by a pattern that maps its own result to
    itself.
    """

    @Pattern
    def twice_absolute(x: Tensor) -> Tensor:
        return torch.abs(torch.abs(x))

    x = torch.randn(4)
    once = rewritten(lambda x: x.abs().abs().abs().abs(), x)
    again = rewritten(lambda x: once(x), x)
    for gm in (once, again):
        calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        assert calls == ["fusion.twice_absolute.default"] * 2


def definition(kind: str):
    if kind == "own replacement":
        templates(next(p for p in patterns() if p.name == "add_mul"))
        rewritten(lambda x, y: (x + y) * y, torch.ones(2), torch.ones(2))  # now the op exists

        @Pattern
        def broken(x: Tensor, y: Tensor) -> Tensor:
            return torch.ops.fusion.add_mul(x, y, y, None).sin()

        return broken, "it calls fusion.add_mul.default, which is what patterns are replaced with"
    if kind == "control flow":

        @Pattern
        def broken(x: Tensor) -> Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

        return broken, "the reference cannot be traced: it reads the value of a tensor"
    if kind == "random numbers":

        @Pattern
        def broken(x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

        return broken, "only dropout may draw random numbers"
    if kind == "nothing computed":

        @Pattern
        def broken(x: Tensor) -> Tensor:
            return x

        return broken, "tensors that it computes"


@pytest.mark.parametrize(
    "kind", ["own replacement", "control flow", "random numbers", "nothing computed"]
)
def test_a_pattern_that_cannot_be_is_told_so(kind, scratch):
    broken, why = definition(kind)
    with pytest.raises(
        PatternError, match=re.escape(f"pattern broken ({__file__}:") + r"\d+\): .*" + why
    ):
        check_pattern(broken)


def test_of_two_readings_the_one_that_nothing_else_reads_is_taken():
    """Either dropout could be the pattern's; the first is also used by what comes before."""

    def model(x, w, v, b):
        a = F.dropout(x, 0.1)
        c = F.dropout(F.linear(a, v), 0.1)
        return F.layer_norm(c + a, (8,), w, b)

    only = {"fusion.gate": "always", "fusion.only": "dropout_add_layer_norm"}
    args = torch.randn(4, 8), torch.randn(8), torch.randn(8, 8), torch.randn(8)
    args = [a.requires_grad_() for a in args]
    report = explain(model, *args, options=only)
    (site,) = [s for s in report.sites if s.pattern == "dropout_add_layer_norm"]
    assert site.fused, site.reason


def test_another_reading_keeps_out_of_what_is_fused(scratch):
    """`upper` can be read with either operand: of one a value is used elsewhere too, and the other
    is part of `lower`, which is fused.
    """

    @Pattern
    def upper(x: Tensor, y: Tensor) -> Tensor:
        return (torch.cos(x).sin() + y).exp()

    @Pattern
    def lower(x: Tensor) -> Tensor:
        return torch.tan(x).cos().sin().tanh().cos().sin()

    upper.kernel(lambda x, y: (x.cos().sin() + y).exp())

    def model(a, b):
        v = b.tan().cos().sin().tanh().cos().sin()
        u = a.cos().sin()
        return (u + v).exp(), u

    sites = told(model, *torch.randn(2, 4))
    assert sites["lower"][0]
    assert not sites["upper"][0] and "used elsewhere too" in sites["upper"][1]
