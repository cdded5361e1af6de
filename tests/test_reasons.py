"""No site vanishes without a reason: values that rules put into other terms are found in the graph,
operands by what broadcasts, and what was not read to the end, or not to the letter, is told.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend import Pattern, explain
from fusion_backend.capture.tracer import capture
from fusion_backend.decide.facts import Facts
from fusion_backend.frontends.explain import Collector
from fusion_backend.frontends.loading import patterns
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.match import unify
from fusion_backend.match.matcher import Matcher
from fusion_backend.match.templates import templates
from fusion_backend.testing import collect, fused_nodes
from tests.test_masks import INF, causal, grid, masks_of

X, W, B, BIG = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32), torch.randn(2, 8, 16)
DROP = torch.rand(8, 32) > 0.5


def by_hand(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


BIASED = {
    "linear": lambda x, w, b: F.linear(x, w, b).softmax(-1),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()).softmax(-1),
    "of more dimensions": lambda x, w, b: F.linear(x.expand(3, 8, 16), w, b).softmax(-1),
    "by hand": lambda x, w, b: by_hand(F.linear(x, w, b)),
    "in another dtype": lambda x, w, b: F.linear(x, w, b).softmax(-1, dtype=torch.float32),
    "upcast": lambda x, w, b: F.linear(x, w, b).float().softmax(-1),
    "filled": lambda x, w, b: F.linear(x, w, b).masked_fill(DROP, -1e9).softmax(-1),
    "two biases": lambda x, w, b: (F.linear(x, w, b) + b).softmax(-1),
    "of a scaled input": lambda x, w, b: ((x * 0.5) @ w.t()).softmax(-1),
    "a router": lambda x, w, b: F.linear(x, w, b).float().softmax(-1).topk(2).values,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", BIASED)
def test_softmax_of_a_product(how, dtype):
    collector = Collector({"fusion.gate": "always", "fusion.only": "softmax"})
    given = [t.to(dtype) for t in (X, W, B)]
    out = torch.compile(BIASED[how], backend=collector, dynamic=False)(*given)
    if how == "in another dtype" and dtype == torch.bfloat16:
        assert not collector.report.fused and [m.pattern for m in collector.report.misses] == [
            "softmax"
        ]
    else:
        assert [s.pattern for s in collector.report.fused] == ["softmax"], collector.report
    rtol, atol = (2e-2, 1e-3) if dtype == torch.bfloat16 else (1e-5, 1e-6)
    torch.testing.assert_close(out, BIASED[how](*given), rtol=rtol, atol=atol)


def test_scores_keep_their_grad_mode():
    """The same scores with and without a gradient are two values, in terms of a scale too."""

    def model(q, k):
        with torch.no_grad():
            fixed = q @ k
        return torch.softmax(fixed, -1), torch.softmax(q @ k, -1)

    q, k = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    (graph,) = collect(model, q, k, dynamic=False).sources
    view = capture(graph)
    canon = Canon().run(view.graph, view.region)
    fixed, scores = (
        e.args[0] for n, e in canon.of.items() if n.target is torch.ops.aten.softmax.int
    )
    assert str(fixed) == str(scores) and fixed is not scores


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("of", [torch.sin, lambda x: x], ids=["computed", "given"])
def test_a_bias_is_what_broadcasts(of, swapped):
    def model(b, x):
        return torch.relu(b + of(x) if swapped else of(x) + b)

    collector = collect(
        model, torch.randn(6), torch.randn(4, 6), dynamic=False, options={"fusion.only": "bias_act"}
    )
    (node,) = fused_nodes(collector.graphs[0])
    assert [tuple(a.meta["example_value"].shape) for a in node.args[:2]] == [(4, 6), (6,)]


def test_a_bias_in_a_sum_of_three(scratch):
    @Pattern
    def tanh_of_sum(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x + y + b)

    @tanh_of_sum.inputs(dict(n=6))
    def _(tensor, n):
        return tensor(4, n), tensor(4, n), tensor(n)

    def model(b, x, y):
        return torch.tanh((b + x.sin()) + y.cos())

    given = torch.randn(6), torch.randn(4, 6), torch.randn(4, 6)
    (node,) = fused_nodes(
        collect(model, *given, dynamic=False, options={"fusion.only": "tanh_of_sum"}).graphs[0]
    )
    assert [tuple(a.meta["example_value"].shape) for a in node.args[:3]] == [(4, 6), (4, 6), (6,)]


def test_an_argument_inside_one_operator_is_told():
    report = collect(lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2).relu(), X, W, B).report
    (miss,) = report.misses
    assert (miss.pattern, miss.matched, miss.size) == (
        "bias_act",
        2,
        2,
    ) and "is computed inside one operator" in str(miss)
    report = collect(lambda x, w, b: F.linear(x, w, b).relu(), X, W, B).report
    assert not report.misses and [s.pattern for s in report.fused] == ["linear_act"]


# Unification without end.


def test_running_out_of_steps_is_told(monkeypatch):
    monkeypatch.setattr(unify, "BUDGET", 4)
    report = collect(
        lambda x: torch.softmax(x @ x.mT * 0.3, -1) @ x, BIG, options={"fusion.only": "attention"}
    ).report
    told = [str(m) for m in report.misses if m.pattern == "attention"]
    assert told and all("matching stopped after 4 steps" in text for text in told), report


def test_running_out_of_steps_is_told_before_a_deeper_match():
    _, _, gm = masks_of(lambda x: x.relu(), X)
    matcher = Matcher(gm.graph, Canon().run(gm.graph), patterns()[:1])
    template, n = templates(matcher.patterns[0])[0], list(gm.graph.nodes)[1]
    for matched, why, gave_up in ((3, "deep", False), (1, "gave up", True), (9, "deeper", False)):
        matcher.note(template, n, matched, None, why, gave_up=gave_up)
    (miss,) = matcher.misses.values()
    assert miss.reason == "gave up"


# Finite fills.


def additive(fill):
    return lambda x: torch.where(causal(x), torch.zeros((), dtype=x.dtype), fill)


def chosen_by_hand(q, fill):
    return torch.softmax((q @ q.mT * 0.3).masked_fill(~causal(q @ q.mT), fill), -1) @ q


def added_by_hand(q, fill):
    return torch.softmax(q @ q.mT * 0.3 + additive(fill)(q @ q.mT), -1) @ q


def given_to_sdpa(q, fill):
    return F.scaled_dot_product_attention(q, q, q, additive(fill)(q @ q.mT))


@pytest.mark.parametrize("how", [chosen_by_hand, added_by_hand, given_to_sdpa])
def test_a_finite_fill_is_told_and_refused(how):
    q = torch.randn(2, 4, 16, 8)

    def site(fill, exact):
        torch.compiler.reset()
        options = {"fusion.gate": "always", "fusion.only": "attention", "fusion.exact_masks": exact}
        return next(
            s for s in explain(lambda q: how(q, fill), q, options=options, dynamic=False).sites
        )

    told, refused, infinite, exact = (
        site(-1e9, False),
        site(-1e9, True),
        site(INF, False),
        site(INF, True),
    )
    assert told.forward == "library" and "-1e+09 taken for -inf" in told.reason
    assert refused.forward != "library" and "fusion.exact_masks is set" in refused.reason
    assert infinite.forward == exact.forward == "library" and infinite.reason == exact.reason
    assert "taken" not in infinite.reason


@pytest.mark.parametrize(
    "fill, dtype, bias",
    [(-1e9, torch.float32, False), (-65504.0, torch.float16, False), (-1e9, torch.float32, True)],
)
def test_what_a_mask_with_a_finite_fill_is(fill, dtype, bias):
    def make(x):
        mask = additive(fill)(x)
        return mask + x[0] if bias else mask

    x = torch.zeros(2, 6, 6, dtype=dtype)
    masks, result, _ = masks_of(make, x)
    found = masks.of(result)
    assert found.causal and found.taken == (fill,) and found.hides(fill, dtype)
    masks.known.clear()
    masks.exact = True
    found = masks.of(result)
    assert not found.choice and not found.hides(fill, dtype) and found.hides(-math.inf, dtype)
    assert f"{fill:g} is not taken for -inf: fusion.exact_masks is set" in str(found)


def test_a_window_of_two_masks_tells_both_fills():
    def make(x):
        i, j = grid(x)
        return torch.where(j <= i, 0.0, -1e9), torch.where(j > i - 3, 0.0, -2e9)

    masks, results, _ = masks_of(make, torch.zeros(6, 6))
    assert masks.of(results[0]).together(masks.of(results[1])).taken == (-2e9, -1e9)


def test_the_option_reaches_the_masks_and_is_checked():
    with pytest.raises(ValueError, match="fusion.exact_masks is 'yes'; it must be True or False"):
        Collector({"fusion.exact_masks": "yes"})
    masks, _, gm = masks_of(causal, torch.zeros(6, 6))
    assert Facts(masks.view, masks.canon, True, {}).masks.exact and not masks.exact


def test_arguments_of_another_shape_are_told():
    """The arguments before they are expanded would give another result."""

    def f(x, y):
        return torch.exp((x.expand(4, 8) + y.expand(4, 8)) * 2)

    x = torch.randn(1, 8)
    report = explain(f, x, x + 1, options={"fusion.gate": "always"})
    reasons = [m.reason for m in report.misses if m.pattern == "add_mul_exp"]
    assert not report.sites and "the result is (4, 8), the pattern gives (1, 8)" in reasons[0]


@pytest.mark.parametrize(
    "x, mask, why",
    [
        ((8, 1), (8, 100), "x with shape (8, 1) is expanded to a mask of shape (8, 100)"),
        ((1, 8, 100), (3, 8, 100), "is expanded to a mask"),
        ((8, 1), (1, 100), "is expanded to a mask"),
        ((8, 100), (3, 8, 100), "is expanded to a mask"),
        ((2, 2, 2, 8, 100), (8, 100), "x has 5 dimensions and a mask; the kernel takes up to 4"),
        ((3, 8, 100), (8, 100), ""),
        ((3, 8, 100), (3, 1, 100), ""),
    ],
)
def test_masks_that_the_kernel_of_softmax_does_not_take(x, mask, why):
    (softmax,) = [p for p in patterns() if p.name == "softmax"]
    x, mask = torch.randn(x), torch.randn(mask)
    for given in ((mask, None, None), (None, mask > 0, -1e9)):
        refused = softmax.guard_fn(x, None, *given)
        assert why in str(refused and refused.reason) and bool(refused) == bool(why)
