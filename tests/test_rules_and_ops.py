"""An op without a rule, a rule without an op, a rule that leads to another's op, and analyses of a
user's own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_backend
from fusion_backend import Op, Pattern, PatternError, Reject, Replacement, Rule, analysis, explain
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.registry import FUSION_RULES, OPS, unregister
from fusion_backend.ops.rule import ANALYSES
from fusion_backend.testing import assert_fuses, check_pattern, collect, graph_text


@pytest.fixture(autouse=True)
def scratch():
    """What a test registers is gone afterwards."""
    patterns()  # the built-in ones are loaded when they are first asked for
    before, analyses = {*FUSION_RULES, *OPS}, dict(ANALYSES)
    yield
    for name in {*FUSION_RULES, *OPS} - before:
        unregister(name)
    ANALYSES.clear()
    ANALYSES.update(analyses)


def swish_op():
    @Op
    def swish_op(x: Tensor, beta: float) -> Tensor:
        return x * torch.sigmoid(beta * x)

    return swish_op


def test_an_op_is_called_without_any_matching():
    op = swish_op()
    x = torch.randn(3, 5, requires_grad=True)
    out = op(x, 1.5)
    out.sum().backward()
    mine, x.grad = x.grad, None
    (x * torch.sigmoid(1.5 * x)).sum().backward()
    torch.testing.assert_close(out, x * torch.sigmoid(1.5 * x))
    torch.testing.assert_close(mine, x.grad)
    assert "swish_op" in OPS and "swish_op" not in FUSION_RULES
    assert_fuses(lambda x: x * torch.sigmoid(1.5 * x), x, pattern="swish_op", count=0)
    with pytest.raises(TypeError, match=r"swish_op takes \(x, beta\)"):
        op(x)


def test_an_op_may_get_another_kernel_after_it_was_called():
    """A notebook's cell with the kernel is run again: the operator gets the new schema."""
    op = swish_op()
    x = torch.randn(3, 5, requires_grad=True)
    before = op(x, 1.5)

    @op.kernel(saves=("gate",))
    def _(x, beta, save):
        return x * torch.sigmoid(beta * x), torch.sigmoid(beta * x)

    @op.saved
    def _(x, beta):
        return torch.sigmoid(beta * x)

    assert not hasattr(torch.ops.fusion, "swish_op"), "the old one has another schema"
    torch.testing.assert_close(op(x, 1.5), before)
    assert len(torch.ops.fusion.swish_op(x, 1.5)) == 2


def test_an_op_with_dropout_draws_a_seed():
    @Op
    def dropped(x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p, True)

    @dropped.seeded
    def _(x, p, seed):
        return x * (seed % 2)

    x = torch.ones(2)
    seen = {dropped(x, 0.5)[0].item() for _ in range(50)}
    assert seen == {0.0, 1.0}


def test_a_rule_leads_to_a_torch_operator():
    @Rule
    def square(x: Tensor) -> Tensor:
        return x * x

    @square.replacement
    def _(x):
        return Replacement(torch.ops.aten.square.default, (x,), {}, "one operand")

    found = collect(lambda x: (x + 1) * (x + 1), torch.randn(4), options={"fusion.only": "square"})
    (site,) = found.report.fused
    assert (site.pattern, site.forward, site.reason) == ("square", "library", "one operand")
    assert "square(" in graph_text(found.graphs[0]) and "square" not in OPS
    proof = check_pattern(square)
    assert any("traced and recognised" in line for line in proof.checked), proof


def test_two_rules_lead_to_one_op():
    op = swish_op()

    def rule_of(name, reference, beta):
        reference.__name__ = name
        rule = Rule(reference)
        rule.replacement(lambda x: Replacement(op, (x, beta), {}, name))
        return rule

    def first(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    def second(x: Tensor) -> Tensor:
        return torch.sin(x).tanh() * 3

    rule_of("first_of_two", first, 1.702)
    rule_of("second_of_two", second, 9.0)
    graph = collect(lambda x: first(x) - second(x), torch.randn(4)).graphs[0]
    assert graph_text(graph).count("fusion.swish_op(") == 2

    @op.guard
    def _(x):
        return Reject("not today")

    report = explain(lambda x: first(x) - second(x), torch.randn(4))
    reasons = {s.pattern: s.reason for s in report.sites if "of_two" in s.pattern}
    assert reasons == {
        "first_of_two": "the code stays as it is: first_of_two; it has been timed on CUDA only",
        "second_of_two": "the code stays as it is: second_of_two; it has been timed on CUDA only",
    }
    report = explain(lambda x: first(x) + 1, torch.randn(4), options={"fusion.gate": "always"})
    assert "not today" in next(s.reason for s in report.sites if s.pattern == "first_of_two")


def test_a_rule_without_a_replacement_says_so():
    @Rule
    def lonely(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    report = explain(lambda x: torch.sin(x).tanh(), torch.randn(4))
    (site,) = [s for s in report.sites if s.pattern == "lonely"]
    assert not site.fused and site.reason == "the rule has no replacement"


def test_a_tensor_that_the_replacement_made_is_refused():
    @Rule
    def lonely(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    lonely.replacement(lambda x: Replacement(torch.ops.aten.sin.default, (x + 1,), {}, "a trick"))
    with pytest.warns(RuntimeWarning, match="a tensor of shape .* that it was not given"):
        report = explain(lambda x: torch.sin(x).tanh(), torch.randn(4))
    (site,) = [s for s in report.sites if s.pattern == "lonely"]
    assert not site.fused


def refused(replacement) -> str:
    """Why a rule with this replacement leaves its site."""

    @Rule
    def lonely(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    lonely.replacement(replacement)
    with pytest.warns(RuntimeWarning, match="its replacement at line .* returned a Replacement"):
        report = explain(
            lambda x: torch.sin(x).tanh(), torch.randn(4), options={"fusion.gate": "always"}
        )
    (site,) = [s for s in report.sites if s.pattern == "lonely"]
    assert not site.fused and not report.graphs[0].error
    unregister("lonely")
    fusion_backend.reset()  # it would not be told again
    return site.reason


def test_a_call_that_no_graph_can_hold_is_refused():
    op, cat, zeros = swish_op(), torch.ops.aten.cat.default, torch.ops.aten.zeros.default
    wrong_name = refused(lambda x: Replacement(op, (x,), {"betaa": 1.0}))
    assert "(0, betaa) for swish_op(x, beta)" in wrong_name
    assert "swish_op(x, beta)" in refused(lambda x: Replacement(op, (x, 1.0, 2.0)))
    assert "in a list or by keyword" in refused(lambda x: Replacement(cat, ([x, x],)))
    assert "by keyword" in refused(lambda x: Replacement(op, (), {"x": x, "beta": 1.0}))
    assert "without a tensor" in refused(lambda x: Replacement(zeros, ([4],)))


def test_keywords_reach_the_guard_in_the_order_of_the_reference():
    @Op
    def scaled(x: Tensor, low: float, high: float) -> Tensor:
        return x * low + high

    seen = []

    @scaled.guard
    def _(x, low, high):
        seen.append((low, high))
        return Reject("asked")

    @Rule
    def lonely(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    lonely.replacement(lambda x: Replacement(scaled, (x,), {"high": 2.0, "low": 1.0}))
    explain(lambda x: torch.sin(x).tanh(), torch.randn(4), options={"fusion.gate": "always"})
    assert seen == [(1.0, 2.0)]


def test_an_analysis_of_a_users_own():
    """It is told the node, and what is known of the graph; the rule is told what it answers."""
    seen = []

    @analysis
    def comes_from(node, graph):
        seen.append(node in graph.order)
        return node.op

    @Rule
    def inner(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    @inner.replacement(asks={"x": "comes_from"})
    def _(x, known):
        if known["x"] != "placeholder":
            return Reject(f"x is a {known['x']}")
        return Replacement(torch.ops.aten.sin.default, (x,), {}, "wrong, but told")

    report = explain(lambda x: (torch.sin(x).tanh(), torch.sin(x + 1).tanh()), torch.randn(4))
    sites = sorted((s.fused, s.reason) for s in report.sites if s.pattern == "inner")
    assert sites == [(False, "x is a call_function"), (True, "wrong, but told")] and all(seen)


def test_an_analysis_that_does_not_exist_is_told():
    @Pattern
    def inner(x: Tensor) -> Tensor:
        return torch.sin(x).tanh()

    @inner.replacement(asks={"x": "comes_from_nowhere"})
    def _(x, known):
        return Replacement(inner, (x,))

    with pytest.warns(RuntimeWarning, match="it asks for comes_from_nowhere; the analyses are att"):
        report = explain(lambda x: torch.sin(x).tanh(), torch.randn(4))
    assert not report.fused

    def attention_mask(node, graph): ...

    with pytest.raises(PatternError, match=r"the analysis attention_mask exists: .*analyses.py"):
        analysis(attention_mask)
