"""Six Hugging Face architectures end to end on CPU: results, gradients, sites, graphs and the cost
of the pass.

The gate is "always": every match is rewritten, with its reference inlined, and Inductor compiles
the result.
"""

import contextlib
import copy

import pytest
import torch

import fusion_backend
from benchmarks.measure.distance import distance, joint_distance
from benchmarks.subjects.tiny_models import MODELS, loss, result
from tests.machine import slowness
from tests.selection import only_full

pytest.importorskip(
    "transformers", reason="the models come from transformers: pip install -e '.[bench]'"
)

# Twice eager's own distance from fp64, and a floor of about two fp32 roundings: Inductor orders
# sums differently, and where eager happens to be exact the double of nothing is nothing.
FACTOR, FLOOR = 2.0, 1.2e-7
# Milliseconds of CPU time a node for capture + match + rewrite, on an idle machine: twice the worst
# that `python -m benchmarks.capture_cost` measures (0.43 and 0.85 on two cores).
COST_MS = {False: 1.0, True: 2.0}  # static; dynamic, where every shape rule reasons about symbols


def step(model, inputs, train):
    """The result, and after a training step the gradients by parameter."""
    if not train:
        with torch.no_grad():
            return result(model(**inputs)), {}
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    loss(output).backward()
    gradients = {
        name.removeprefix("_orig_mod."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return result(output).detach(), gradients


def dynamo_graphs(model, inputs, train, dynamic) -> int:
    """How many graphs Dynamo makes of it; no backend after it changes that."""
    graphs = []

    def count(gm, _):
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    for example in inputs:
        step(torch.compile(model, backend=count, dynamic=dynamic), example, train)
    return len(graphs)


def assert_as_close_as_eager(got, eager, exact):
    worst = FACTOR * distance(eager[0], exact[0]) + FLOOR
    assert distance(got[0], exact[0]) <= worst, (
        f"result: {distance(got[0], exact[0]):.1e} > {worst:.1e}"
    )
    assert got[1].keys() == exact[1].keys()
    if exact[1]:
        worst = FACTOR * joint_distance(eager[1], exact[1]) + FLOOR
        ours = joint_distance(got[1], exact[1])
        assert ours <= worst, f"gradients: {ours:.1e} > {worst:.1e}"


def cost_ms(report) -> float:
    """Milliseconds a node of the Dynamo graphs for capture, match and rewrite, as an idle machine
    would take them.
    """
    seconds = sum(graph.capture_s + graph.match_s + graph.rewrite_s for graph in report.graphs)
    return seconds * 1e3 / sum(graph.nodes for graph in report.graphs) / slowness()


@pytest.fixture(scope="module", autouse=True)
def templates():
    """Patterns are traced once a process; no model should pay for that in its cost."""
    fusion_backend.explain(lambda x: torch.nn.functional.layer_norm(x, (8,)) + 1, torch.ones(2, 8))


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_norm_is_found(name):
    tiny = MODELS[name]
    options = {"fusion.gate": "always", "fusion.only": "layer_norm"}
    report = fusion_backend.explain(tiny.model(), options=options, **tiny.example(2, 16))
    assert len(report.fused) == tiny.layer_norms, report


# Each compiles for seconds, so models that are like one before them go fewer ways.
# tests/test_attention_models.py has all of these in more, without Inductor.
WAYS = {"inference": (False, False), "training": (True, False), "training-dynamic": (True, True)}
FEWER = {
    "llama": ["inference", "training"],
    "qwen3": ["training", "training-dynamic"],
    "gpt2": ["inference", "training"],
    "bert": ["training-dynamic"],
    "t5": ["training-dynamic"],
    "vit": ["training"],
}
# Of `--full`: gpt2 has the inference and llama the training. tests/test_attention_models.py has the
# sizes.
REST = {("llama", "inference"), ("qwen3", "training"), ("qwen3", "training-dynamic")}
REST |= {("bert", "training-dynamic")}
REST |= {("gpt2", "training"), ("t5", "training-dynamic"), ("vit", "training")}
CASES = [
    (only_full if (name, way) in REST else pytest.param)(name, *WAYS[way], id=f"{name}-{way}")
    for name in MODELS
    for way in FEWER.get(name, WAYS)
]
# One as a user runs it, with what Inductor generates; the others with eager kernels, until --full.
# Inductor's code of training is run by tests/test_every_pattern.py, that of dynamic sizes by
# tests/oracle/test_dynamic.py.
GENERATED = {("gpt2", False, False)}


@pytest.fixture
def kernels(request):
    """Of Inductor or of eager, as the model and its way ask for."""
    asked = tuple(request.getfixturevalue(what) for what in ("name", "train", "dynamic"))
    request.getfixturevalue("scalar_code" if asked in GENERATED else "eager_kernels")


@pytest.mark.parametrize("name, train, dynamic", CASES)
def test_model(name, train, dynamic, kernels, capsys):
    tiny = MODELS[name]
    model = tiny.model()
    exact = copy.deepcopy(model).double()
    inputs = [tiny.example(2, 16)] + [tiny.example(3, 20)] * dynamic
    plain_graphs = dynamo_graphs(model, inputs, train, dynamic)

    torch.compiler.reset()
    fusion_backend.reset()
    compiled = torch.compile(
        model, backend="fusion", options={"fusion.gate": "always"}, dynamic=dynamic
    )
    for example in inputs:
        double = {key: x.double() if x.is_floating_point() else x for key, x in example.items()}
        got, eager = step(compiled, example, train), step(model, example, train)
        assert_as_close_as_eager(got, eager, step(exact, double, train))

    report = fusion_backend.report()
    assert [graph.error for graph in report.graphs] == [None] * plain_graphs, report
    if tiny.layer_norms:  # each fused once, alone or inside a larger pattern
        assert (
            sum(site.fused and "norm" in site.pattern for site in report.sites) == tiny.layer_norms
        ), report
    if train:
        assert all(site.backward for site in report.sites if site.fused), report

    cost = cost_ms(report)
    for _ in range(3):
        if cost <= COST_MS[dynamic]:
            break
        torch.compiler.reset()  # somebody else's load? look again, without compiling
        with contextlib.nullcontext() if train else torch.no_grad():
            cost = min(cost, cost_ms(fusion_backend.explain(model, dynamic=dynamic, **inputs[0])))
    with capsys.disabled():
        print(f" {cost:.2f} ms a node", end=" ")
    assert cost <= COST_MS[dynamic]
