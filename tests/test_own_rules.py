"""Rules that somebody adds from outside, for an operator of their own or instead of one of ours."""

import pytest
import torch
from torch import Tensor

from fusion_backend import Pattern, PatternError
from fusion_backend.cache.disk import file_of
from fusion_backend.compat.torch import FakeTensorMode, trace
from fusion_backend.ir import Builder, Call, Expr, composite, counts, reset_counts, rule
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.rules import COMPOSITES, RULES, TABLES
from fusion_backend.match.matcher import Matcher
from fusion_backend.match.templates import templates
from fusion_backend.ops.registry import unregister
from fusion_backend.testing import assert_fuses


@torch.library.custom_op("fusion_tests::swish", mutates_args=())
def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _(x, beta=1.0):
    return torch.empty_like(x)


def meaning(c: Builder, call: Call, x: Expr, beta: float):
    scaled = c.mul(x, c.const(beta), call.shape)
    return c.mul(x, c.make("sigmoid", (scaled,), None, call.shape), call.shape)


@pytest.fixture
def tables():
    """The tables of rules, which are put back afterwards."""
    before = [dict(t) for t in (RULES, COMPOSITES)]
    yield
    for table, rules in zip((RULES, COMPOSITES), before, strict=True):
        table.clear()
        table.update(rules)
        table.version += 1  # what was traced with the rules of the test is traced anew


@pytest.fixture
def swish_sum():
    @Pattern
    def swish_sum(x: Tensor, y: Tensor, s: float) -> Tensor:
        return x * torch.sigmoid(s * x) + y

    yield swish_sum
    unregister("swish_sum")


def sites(pattern: Pattern, fn, *args) -> int:
    mode = FakeTensorMode()
    gm = trace(fn, [mode.from_tensor(a) for a in args], mode)
    return len(list(Matcher(gm.graph, Canon().run(gm.graph), [pattern]).candidates()))


def theirs(x, y):
    return y + torch.ops.fusion_tests.swish(x, 1.5)


X, Y = torch.randn(4, 64), torch.randn(4, 64)


def test_a_pattern_matches_through_an_operator_of_somebody_else(tables, swish_sum):
    assert sites(swish_sum, theirs, X, Y) == 0
    reset_counts()
    rule("fusion_tests::swish")(meaning)
    assert sites(swish_sum, theirs, X, Y) == 1
    assert sites(swish_sum, lambda x, y: theirs(x, y) * 2, X, Y) == 1
    (found,) = [c for c in counts() if c.subject == "fusion_tests::swish"]
    assert found.rule == f"{__name__}.meaning" and found.table == "expressions"
    assert found.asked == found.applied == 2 and found.seconds > 0


def test_it_is_fused(tables, swish_sum, monkeypatch):
    """The other patterns, which would be traced anew with this rule, are left out."""
    monkeypatch.setattr("fusion_backend.frontends.explain.patterns", lambda: [swish_sum])
    rule("fusion_tests::swish")(meaning)
    assert_fuses(theirs, X, Y, pattern="swish_sum")


def test_a_scalar_of_a_pattern_is_captured_through_it(tables):
    rule("fusion_tests::swish")(meaning)

    @Pattern
    def swish_sum(x: Tensor, y: Tensor, s: float) -> Tensor:
        return torch.ops.fusion_tests.swish(x, s) + y

    unregister("swish_sum")
    assert sites(swish_sum, lambda x, y: y + x * torch.sigmoid(1.5 * x), X, Y) == 1


def test_templates_are_traced_anew(tables, swish_sum):
    """In this process, and in another one, whose file has another name."""
    pattern = swish_sum
    before, file = templates(pattern), file_of(pattern)
    assert templates(pattern) is before
    rule("fusion_tests::swish")(meaning)
    assert templates(pattern) is not before
    assert file is None or file_of(pattern) != file


def test_the_rule_of_somebody_else_is_asked_first(tables, swish_sum):
    """And ours where theirs does not apply."""
    asked = []

    def declines(c, call, self: Expr, other: Expr):
        asked.append(call.name)

    rule("aten::mul")(declines)
    assert sites(swish_sum, lambda x, y: x * torch.sigmoid(1.5 * x) + y, X, Y) == 1
    assert asked and set(asked) == {"mul"}


def test_a_composite_of_somebody_else(tables, swish_sum):
    """Of values that are known to be no smaller than the number that they are clamped at."""

    @composite("maximum")
    def never_small(c: Builder, x: Expr, y: Expr, shape):
        values = [e for e in (x, y) if e.op != "const"]
        return values[0] if len(values) == 1 else None

    def clamped(x, y):
        return torch.clamp_min(x, 1e-3) * torch.sigmoid(1.5 * x) + y

    assert sites(swish_sum, clamped, X, Y) == 1
    del COMPOSITES["maximum"]
    assert sites(swish_sum, clamped, X, Y) == 0


def test_a_function_of_the_same_name_is_replaced(tables):
    for _ in range(2):
        rule("fusion_tests::swish")(meaning)
    assert len(RULES["fusion_tests::swish"]) == 1


def test_a_rule_applies_where_the_operator_has_its_arguments(tables):
    """aten::max has overloads of one tensor, of two, and over one dimension."""

    def of_two(c, call, self: Expr, other: Expr):
        return c.maximum(self, other, call.shape)

    rule("aten::max")(of_two)
    overloads = torch.ops.aten.max
    plans = [[r.where for r, _ in RULES.plan(getattr(overloads, o))] for o in ("default", "other")]
    own = f"{of_two.__module__}.{of_two.__qualname__}"
    assert plans == [[], [own, "fusion_backend.ir.rules_pointwise.maximum"]]
    assert [r.built_in for r, _ in RULES.plan(overloads.dim)] == [True]


def takes_x(c, call, x: Expr): ...


def takes_a_matrix(c, call, self: Expr, mat1: Expr): ...


def takes_mat3(c, call, self: Expr, mat3: Expr | None = None): ...


def takes_min_and_dim(c, call, min: Expr, dim: int): ...


@pytest.mark.parametrize(
    "subject, function, words",
    [
        ("aten::silu", takes_x, "aten::silu has no argument x; it takes (self)"),
        ("aten::add", takes_a_matrix, "aten::add has no argument mat1; it takes (self, other, al"),
        ("aten::addmm", takes_mat3, "aten::addmm has no argument mat3; it takes (self, mat1, mat2"),
        ("aten::sillu", takes_x, "torch has no operator aten::sillu"),
        ("silu", takes_x, "'silu' is no operator; write \"aten::silu\""),
        ("fusion_tests::swish", takes_min_and_dim, "has no argument min; it takes (x, beta)"),
    ],
)
def test_a_rule_that_can_never_be_asked_is_refused(tables, subject, function, words):
    with pytest.raises(PatternError) as error:
        rule(subject)(function)
    line = function.__code__.co_firstlineno
    assert str(error.value).startswith(f"rule {function.__name__} ({__file__}:{line}): ")
    assert words in str(error.value)


def test_a_rule_that_is_refused_is_not_added_in_part(tables):
    before = RULES["aten::silu"]
    with pytest.raises(PatternError, match="no operator aten::sillu"):
        rule("aten::silu", "aten::sillu")(lambda c, call, self: None)
    assert RULES["aten::silu"] == before


def test_no_overload_has_all_arguments_of_a_rule(tables):
    """aten::max has `other` in one overload, and `dim` in another."""

    def of_both(c, call, self: Expr, other: Expr, dim: int): ...

    with pytest.raises(PatternError, match=r"no overload of aten::max has all of \(self, other, d"):
        rule("aten::max")(of_both)


def test_a_composite_is_not_about_an_operator_of_torch(tables):
    with pytest.raises(PatternError, match='canonical operator, "div" say'):
        composite("aten::div")(lambda c, x, y, shape: None)


def test_an_operator_that_is_defined_after_its_rule(tables):
    """The names are compared when a graph first has the operator."""
    rule("fusion_tests::defined_later")(takes_min_and_dim)

    @torch.library.custom_op("fusion_tests::defined_later", mutates_args=())
    def defined_later(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.warns(RuntimeWarning, match="has no argument min; it takes .x.; it is never asked"):
        RULES.plan(torch.ops.fusion_tests.defined_later.default)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_each_rule_of_ours_can_be_asked(table):
    assert table
    wrong = [r.wrong(bool(table.context)) for rules in table.values() for r in rules]
    assert not any(wrong), wrong
