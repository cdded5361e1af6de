"""The graphs of benchmarks.foreign: every one is listed, is built, runs, and differentiates."""

import collections

import pytest
import torch
from torch import Tensor

from benchmarks.foreign_code import listed
from benchmarks.foreign_code.problems import (
    DTYPES,
    PROBLEMS,
    TRAIN,
    Called,
    Graph,
    features,
    problem,
)
from benchmarks.foreign_runs.steps import Step

from . import selection

CPU = torch.device("cpu")
GRAPHS = listed.graphs()
FAMILIES = sorted({graph.problem.family for graph in GRAPHS.values()})


def finite(results: list[Tensor | None]) -> bool:
    return all(bool(x.isfinite().all()) for x in results if x is not None)


def test_the_set_is_large_and_mixed():
    kinds = collections.Counter((graph.mode, graph.dtype) for graph in GRAPHS.values())
    assert len(GRAPHS) >= 150 and len(PROBLEMS) >= 75
    assert all(kinds[mode, dtype] >= 20 for mode in ("infer", "train") for dtype in DTYPES)
    assert set(FAMILIES) == {family.__name__.rpartition(".")[2] for family in listed.FAMILIES}


def test_every_graph_is_listed_once_under_its_name():
    asked = sum(len(p.graphs) for p in PROBLEMS.values())
    assert len(GRAPHS) == asked and all(name == graph.name for name, graph in GRAPHS.items())
    sources = collections.Counter(p.source for p in PROBLEMS.values())
    assert max(sources.values()) == 1, sources.most_common(3)


def test_each_problem_comes_once_before_any_comes_twice():
    first = [graph.problem.name for graph in GRAPHS.values()][: len(PROBLEMS)]
    assert len(set(first)) == len(PROBLEMS)


def test_a_name_is_given_once(monkeypatch):
    monkeypatch.setattr("benchmarks.foreign_code.problems.PROBLEMS", dict(PROBLEMS))
    with pytest.raises(ValueError, match="two problems are called swish"):

        @problem("another", {}, {})
        def swish():
            pass


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_run_and_differentiate(family):
    """By default one graph of each problem, with gradients if there is one: other graphs of it have
    another dtype or no gradients.
    """
    of_family = {name: g for name, g in GRAPHS.items() if g.problem.family == family}
    first = {g.problem.name: name for name, g in reversed(of_family.items())}
    first |= {g.problem.name: name for name, g in of_family.items() if g.mode == TRAIN}
    for name, graph in of_family.items():
        if not selection.FULL and first[graph.problem.name] != name:
            continue
        with torch.set_grad_enabled(graph.mode == TRAIN):
            step = Step(graph, "tiny", CPU)
            found = step(step.module, step.inputs)
        assert finite(found), name
        assert {x.dtype for x in step.wanted(step.inputs)} <= {DTYPES[graph.dtype]}, name
        if graph.mode == TRAIN:
            gradients = found[step.outputs :]
            assert gradients and any(g is not None and g.any() for g in gradients), name


@pytest.mark.parametrize("name", ["resnet_stem train bf16", "t5_layer infer bf16"])
def test_a_graph_has_the_same_numbers_every_time(name):
    (one, xs), (two, ys) = (GRAPHS[name].build("tiny", CPU) for _ in range(2))
    for a, b in zip(
        [*one.state_dict().values(), *xs], [*two.state_dict().values(), *ys], strict=True
    ):
        assert torch.equal(a, b)


def test_only_activations_have_gradients():
    def make(n):
        return Called(lambda m, x, y, i: (x - y)[i]), (
            features(n),
            torch.randn(n),
            torch.arange(n),
        )

    one = Graph(PROBLEMS["swish"].__class__("p", "f", "s", make, {}, dict(n=3), ()), TRAIN, "bf16")
    step = Step(one, "tiny", CPU)
    assert [x.requires_grad for x in step.inputs] == [True, False, False]
    assert [x.dtype for x in step.inputs] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert [x.requires_grad for x in step.fresh()] == [True, False, False]
    out, gradient = step(step.module, step.inputs)
    assert torch.equal(gradient, step.dys[0])
    exact, gradient = step.exact(torch.float64)
    assert exact.dtype == gradient.dtype == torch.float64
    assert torch.allclose(exact, out.double(), atol=0.02)
