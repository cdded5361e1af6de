"""A fault in one rule, site or guard costs that one its fusion. It is told, once; the rest of the
graph is fused.
"""

import warnings

import pytest
import sympy
import torch
import torch.nn.functional as F

import fusion_backend
from fusion_backend.compat.torch import GuardOnDataDependentSymNode
from fusion_backend.decide import gate
from fusion_backend.decide.claims import Claims
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.legality import Legality
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.ir.rules import RULES, Rule
from fusion_backend.masks.analysis import Masks
from fusion_backend.match.matcher import Matcher
from fusion_backend.match.prefilter import Fitting
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.reporting.report import Report
from fusion_backend.testing import collect

BOOM = "ZeroDivisionError: boom"


def model(x, y, q):
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    a = F.scaled_dot_product_attention(q, q, q, mask)
    return F.layer_norm(torch.exp((x + y) * 2), (8,)), a, F.softmax(y, -1)


@pytest.fixture(scope="module")
def graph():
    """As Dynamo hands it over; the pass leaves it as it is."""
    x, q = torch.randn(4, 8), torch.randn(2, 3, 8, 4)
    (gm,) = collect(model, x, x + 1, q, options={"fusion.gate": "never"}).sources
    return gm


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels could run, as far as the gate knows: it asks their guards, and then runs the
    reference on fakes.
    """
    monkeypatch.setattr(gate, "on_gpu", lambda tensor: True)


def run(gm, how="always") -> tuple[GraphRecord, list[str]]:
    """The record of one pass, and what it warned of."""
    record = GraphRecord(0)
    fusion_backend.reset()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fuse_graph(gm, Options(gate=how), record, usable(patterns()))
    return record, [str(w.message) for w in told]


def fused(record) -> list[str]:
    return sorted(s.pattern for s in record.sites if s.fused)


def boom(*args):
    raise ZeroDivisionError("boom")


def needs_guard(*args):
    raise GuardOnDataDependentSymNode(sympy.Eq(sympy.Symbol("u0"), 1), "a long text")


def where(asked, then=boom):
    """A replacement for a function: `then` where `asked` says so of the arguments, else what it
    did.
    """
    return lambda before: lambda *args: then(*args) if asked(*args) else before(*args)


def raising(function) -> tuple[Rule]:
    """The only rule of an operator, which takes none of its arguments."""
    return (Rule("aten::layer_norm", function, RULES.context),)


def is_norm(holder, subject, *rest):
    return getattr(subject, "pattern", subject).name == "layer_norm"


def fits_norm(holder, p, g):
    return p.op == g.op == "rsqrt"


NORM = RULES, "aten::layer_norm"
QUESTIONS = {
    gate.Gate: ("unwanted", "provide", "refused", "op_call"),
    Claims: ("overlap", "conflict"),
    Legality: ("refusal", "not_movable"),
    Facts: ("training",),
}
# Where it is, what is put in its place, who loses by it, and what is told of it.
FAULTS = {
    f"{owner.__name__}.{name}": ((owner, name), where(is_norm), "layer_norm", "deciding it raised")
    for owner, names in QUESTIONS.items()
    for name in names
}
FAULTS |= {
    "rule": (NORM, lambda _: raising(boom), "layer_norm", "the rule of aten::layer_norm raised"),
    "complete": ((Matcher, "complete"), where(is_norm), "layer_norm", "matching it raised"),
    "fitting": ((Fitting, "compare"), where(fits_norm), "layer_norm", "matching it raised"),
    "mask": ((Masks, "of"), lambda _: boom, "attention", "deciding it raised"),
    "guard": (("layer_norm", "guard_fn"), lambda _: boom, "layer_norm", "its guard raised"),
    "replacement": (
        ("attention", "replacement_fn"),
        lambda _: boom,
        "attention",
        "its replacement raised",
    ),
}


def put(monkeypatch, place, replaced) -> None:
    holder, name = place
    if holder is RULES:
        return monkeypatch.setitem(holder, name, replaced(holder[name]))
    holder = FUSION_RULES[holder] if isinstance(holder, str) else holder
    return monkeypatch.setattr(holder, name, replaced(getattr(holder, name)))


@pytest.mark.parametrize("place, replaced, loses, words", FAULTS.values(), ids=FAULTS)
def test_a_fault_costs_one_site(monkeypatch, graph, place, replaced, loses, words):
    (healthy, told) = run(graph)
    assert fused(healthy) == ["add_mul_exp", "attention", "layer_norm", "softmax"] and not told, (
        Report([healthy])
    )
    put(monkeypatch, place, replaced)
    record, told = run(graph)
    assert fused(record) == [p for p in fused(healthy) if p != loses], Report([record])
    assert f"{words} {BOOM}" in " ".join(str(Report([record])).split())
    assert len(told) == 1 and f"{words} {BOOM}" in told[0], told


def test_a_fault_of_worthwhile(monkeypatch, graph):
    monkeypatch.setattr(FUSION_RULES["layer_norm"], "worthwhile_fn", boom)
    record, told = run(graph, "default")
    (site,) = [s for s in record.sites if s.pattern == "layer_norm"]
    assert (
        site.reason == f"its worthwhile raised {BOOM}" and len(told) == 1 and site.reason in told[0]
    )


@pytest.mark.parametrize("place", [("layer_norm", "guard_fn"), (gate.Gate, "provide"), NORM])
def test_a_question_that_needs_a_guard_is_no_fault(monkeypatch, graph, place):
    put(
        monkeypatch,
        place,
        where(is_norm, needs_guard)
        if place[1] == "provide"
        else lambda _: raising(needs_guard) if place is NORM else needs_guard,
    )
    record, told = run(graph)
    assert "layer_norm" not in fused(record) and "add_mul_exp" in fused(record) and not told, (
        Report([record]),
        told,
    )
    reasons = [s.reason for s in record.sites if s.pattern == "layer_norm"]
    assert reasons == (
        [] if place[1].startswith("aten") else ["it would need a guard on Eq(u0, 1)"]
    )


def test_a_pattern_that_a_rule_fails_on_is_left_out(monkeypatch):
    pattern = FUSION_RULES["layer_norm"]
    monkeypatch.setitem(RULES, "aten::layer_norm", raising(boom))
    monkeypatch.setattr(pattern, "memo", {})
    monkeypatch.setattr("fusion_backend.match.templates.load", lambda pattern: None)
    with pytest.warns(
        RuntimeWarning, match=f"the rule of aten::layer_norm raised {BOOM}; it is left out"
    ):
        assert pattern not in usable([pattern, FUSION_RULES["gelu"]])


@pytest.mark.parametrize("fn", [F.softmax, F.log_softmax])
def test_softmax_of_a_single_number(fn):
    """There is no dimension to count from the right."""
    record = collect(
        lambda x: (fn(x.sum(), 0), F.layer_norm(x, (8,))), torch.randn(4, 8)
    ).report.graphs[0]
    assert fused(record) == ["layer_norm"] and not record.faults
