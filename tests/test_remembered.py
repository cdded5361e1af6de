"""A graph that was decided before is written without capture, match and decide, and is the same."""

import copy
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import remembered
from fusion_backend.cache.graph_text import Unnamed, devices_of, graph_text
from fusion_backend.compat.torch import FakeTensor, FakeTensorMode
from fusion_backend.frontends import dynamo
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.ops.registry import unregister
from fusion_backend.options import Options
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.rewrite.recompute import MARK

from . import traced
from .eager_kernels import eager_kernels
from .measured_cases import Block, as_on_a_gpu
from .without_interpreter import output_of

X = torch.randn(4, 16)


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    """Graphs are kept in a folder of the test."""
    monkeypatch.setattr(remembered, "USED", True)
    monkeypatch.setattr(remembered, "cache_folder", lambda: str(tmp_path))
    return tmp_path / "fusion"


def norms(x):
    return F.layer_norm(x.sin(), (16,)) + F.softmax(x, -1) * F.rms_norm(x, (16,))


def once(fn, *inputs, dynamic=None, **options) -> tuple[list[GraphRecord], list]:
    """What the backend does to a function that is compiled anew: its records, and the graphs."""
    graphs = []

    def backend(gm, example_inputs):
        given = Options(**{"gate": "always", **options})
        record = GraphRecord(len(gm.graph.nodes))
        new, used = remembered.fuse(gm, given, record, patterns(), usable)
        records.append(record)
        graphs.append((new, [rule.name for rule in used]))
        return new.forward

    records: list[GraphRecord] = []
    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    return records, graphs


def again(fn, *inputs, **options) -> bool:
    """Is a function that was decided before remembered, when it is asked for like this?"""
    records, _ = once(fn, *inputs, **options)
    return all(record.remembered for record in records)


# What tracing notes of operators of ATen, and AOTAutograd notes anew.
OF_A_TRACE = ("from_node", "original_aten", "seq_nr")


def same_graph(first: torch.fx.GraphModule, second: torch.fx.GraphModule) -> None:
    assert first.code == second.code
    for a, b in zip(first.graph.nodes, second.graph.nodes, strict=True):
        assert (a.op, a.name, str(a.target)) == (b.op, b.name, str(b.target))
        assert {*a.meta} ^ {*b.meta} <= {"example_value", *OF_A_TRACE}
        keys = ("stack_trace", "nn_module_stack", "custom", "recompute", "fusion")
        assert [a.meta.get(k) for k in keys] == [b.meta.get(k) for k in keys]
        ours = [n.meta.get("ac_graph_id") == MARK["ac_graph_id"] for n in (a, b)]
        assert ours[0] == ours[1]
    for name, child in first.named_children():
        if isinstance(child, torch.fx.GraphModule):
            same_graph(child, second.get_submodule(name))


def in_place(x):
    y = x.exp()
    y.add_(1).mul_(2)
    return F.layer_norm(y, (16,)) * y


def parts(x):
    a, b = (x * 2).split(8, -1)
    return F.softmax(a, -1) + b, torch.sigmoid(a) * b


CHECKPOINTED = nn.Linear(16, 16)


def checkpointed(x):
    def body(y):
        return F.layer_norm(CHECKPOINTED(y), (16,)).relu()

    return checkpoint(body, x, use_reentrant=False) * 2


def dropped(x):
    return F.layer_norm(F.dropout(x, 0.5, True) + x, (16,))


def with_its_neighbours(x):
    return F.silu(F.layer_norm(x * 2, (16,))) * 3


def nothing(x):
    return x.sin() + 1


CONV = nn.Conv2d(4, 32, 3)


def laid_out(x):
    return F.layer_norm(CONV(x.view(2, 4, 4, 2).repeat(1, 1, 2, 4)), (6,)).relu()


CASES = [norms, in_place, parts, checkpointed, dropped, laid_out, nothing]


@pytest.mark.parametrize("training", [False, True])
def test_a_match_that_was_extended_is_remembered(training):
    x = X.clone().requires_grad_(training)
    (first,), ((before, used),) = once(with_its_neighbours, x, only=("generated_rows",))
    (second,), ((after, again_used),) = once(with_its_neighbours, x, only=("generated_rows",))
    assert second.remembered and not first.remembered
    assert used == again_used == ["generated_rows"]
    same_graph(before, after)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_it_is_written_as_it_was(fn, training, monkeypatch):
    x = X.clone().requires_grad_(training)
    first, before = once(fn, x)
    assert not any(record.remembered for record in first)
    monkeypatch.setattr(remembered, "fuse_graph", None)  # no pass runs
    second, after = once(fn, x)
    assert all(record.remembered for record in second)
    for (old, used), (new, used_again) in zip(before, after, strict=True):
        same_graph(old, new)
        assert used == used_again
    for old, new in zip(first, second, strict=True):
        assert old.sites == new.sites and old.misses == new.misses
        about = [(r.training, r.operators, r.copied, r.channels_last) for r in (old, new)]
        assert about[0] == about[1]
    assert any(s.fused for r in first for s in r.sites) or fn is nothing
    assert any(r.channels_last for r in first) is (fn is laid_out)


def test_what_backward_computes_again_is_marked_again(monkeypatch, tmp_path):
    w = torch.randn(16, 16, requires_grad=True)

    def fn(x):
        return F.layer_norm(F.gelu(x @ w), (16,))

    with as_on_a_gpu(monkeypatch, tmp_path):
        _, ((first, _),) = once(fn, X)
        _, ((second, _),) = once(fn, X)
    assert any(n.meta.get("ac_graph_id") == MARK["ac_graph_id"] for n in first.graph.nodes)
    same_graph(first, second)


@pytest.mark.parametrize("images", [False, True])
def test_a_model_has_the_same_results_report_and_place_in_caches(
    images, monkeypatch, tmp_path, scalar_code
):
    model = nn.Sequential(nn.Conv2d(4, 32, 3), nn.BatchNorm2d(32), nn.ReLU()) if images else Block()
    model, x = model.eval(), torch.randn(2, 4, 8, 8) if images else torch.randn(2, 6, 16)
    options, seen = {"fusion.gate": "always"}, []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        torch._dynamo.reset()
        fusion_backend.reset()
        counters.clear()
        compiled = torch.compile(model, backend="fusion", dynamic=False, options=options)
        with torch.set_grad_enabled(images):  # images are laid out where a network is trained
            result = compiled(x)
        if images:  # a graph with a backward is cached when that is compiled
            result.sum().backward()
        seen.append((result, str(fusion_backend.report())))
    (graph,) = fusion_backend.report().graphs
    assert graph.remembered and graph.channels_last is images
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def with_precision(fn):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        return fn()
    finally:
        torch.set_float32_matmul_precision(before)


def with_setting(fn):
    with torch._inductor.config.patch(fallback_random=True):
        return fn()


def with_gradients(fn):
    with torch.no_grad():
        return fn()


def norms_elsewhere(x):
    return F.layer_norm(x.sin(), (16,)) + F.softmax(x, -1) * F.rms_norm(x, (16,))


def with_newer_setting(fn):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee" if before == "tf32" else "tf32"
    try:
        return fn()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


OTHER = {
    "shape": lambda: again(norms, torch.randn(5, 16), dynamic=False),
    "dtype": lambda: again(norms, X.bfloat16()),
    "strides": lambda: again(norms, torch.randn(16, 4).t()),
    "gradient": lambda: again(norms, X.clone().requires_grad_()),
    "option": lambda: again(norms, X, skip=("softmax",)),
    "gate": lambda: again(norms, X, gate="never"),
    "line": lambda: again(norms_elsewhere, X),
    "precision": lambda: with_precision(lambda: again(norms, X)),
    "newer name of the precision": lambda: with_newer_setting(lambda: again(norms, X)),
    "setting": lambda: with_setting(lambda: again(norms, X)),
    "grad mode": lambda: with_gradients(lambda: again(norms, X)),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_a_decision_depends_on_is_asked(what):
    once(norms, X)
    assert again(norms, X)
    assert not OTHER[what]()


@pytest.mark.parametrize("name", ["TRITON_DEFAULT_FP_FUSION", "TRITON_PTXAS_PATH"])
def test_a_variable_of_tritons_is_asked(name, monkeypatch):
    once(norms, X)
    monkeypatch.setenv(name, "/opt/cuda/bin/ptxas")
    assert not again(norms, X)


def test_the_ptxas_that_inductor_names_is_no_other_than_before(monkeypatch):
    once(norms, X)
    monkeypatch.setenv("TRITON_PTXAS_PATH", f"{os.path.dirname(torch.__file__)}/bin/ptxas")
    assert again(norms, X)


def test_memory_that_arguments_share_is_asked():
    def add(x, y):
        return F.softmax(x, -1) + y

    once(add, X, X + 1)
    assert again(add, X, X + 1)
    assert not again(add, X, X.view_as(X))  # of the same shape, strides and offset


def test_a_pattern_that_is_defined_anew_is_asked():
    def define(function):
        @fusion_backend.Pattern
        def remembered_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
            return limit * function(x / limit)

    try:
        define(torch.tanh)
        once(norms, X)
        assert again(norms, X)
        unregister("remembered_clip")
        assert not again(norms, X)
        define(torch.atan)
        assert not again(norms, X)
    finally:
        unregister("remembered_clip")


def test_an_operator_that_is_declared_anew_is_asked():
    def define(declaration):
        library = torch.library.Library("remembered", "FRAGMENT")
        library.define(declaration)
        library.impl("same", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("same", lambda x: torch.empty_like(x), "Meta")
        return library

    def fn(x):
        return F.softmax(torch.ops.remembered.same(x), -1)

    library = define("same(Tensor x) -> Tensor")
    once(fn, X)
    assert again(fn, X)
    library._destroy()
    library = define("same(Tensor(a!) x) -> Tensor")
    try:
        assert not again(fn, X)
    finally:
        library._destroy()


def test_a_graph_without_a_name_for_everything_is_decided_each_time(memory):
    def own(x):
        return F.softmax(x, -1)

    for _ in range(2):
        assert not again(own, torch.randn(5, 7), dynamic=True)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    graph.graph.call_function(lambda x: x)
    with pytest.raises(Unnamed, match="lambda"):
        graph_text(graph)
    assert not list(memory.glob("graph-*"))


def test_a_view_without_gradients_of_what_is_written_to_is_no_fault(memory):
    def fn(x):
        y = x + 1
        with torch.no_grad():
            z = y.mT.softmax(-1)
            y[..., :2] = 1.0
        return z, y

    for _ in range(2):  # whether such a value is a leaf cannot be told, so the graph is not kept
        (record,), _ = once(fn, torch.randn(5, 5, requires_grad=True))
        assert record.sites and not record.remembered and not record.faults


@pytest.mark.parametrize("about", ["stack_trace", "nn_module_stack"])
def test_places_are_told_apart_and_written_once(about):
    """All ways to give three nodes one of three places, which a report names."""
    graph = torch.fx.symbolic_trace(lambda x: x.exp().sin().cos())
    nodes = list(graph.graph.nodes)[1:4]
    places = ["a.py, line 1", "a.py, line 2", "b.py, line 1"]

    def text(chosen):
        for node, place in zip(nodes, chosen, strict=True):
            node.meta[about] = place if about == "stack_trace" else {"0": (place, nn.Linear)}
        return graph_text(graph)

    ways = list(itertools.product(places, repeat=3))
    assert len({text(way) for way in ways}) == len(ways)
    for way in ways:
        assert all(text(way).count(place) == (place in way) for place in places)


def test_the_gpus_of_lone_values_and_of_those_in_a_tuple_are_found():
    def fake(device):
        return FakeTensor(FakeTensorMode(), torch.empty(2, device="meta"), torch.device(device))

    graph = torch.fx.symbolic_trace(lambda x, y: x + y)
    values = fake("cuda:1"), fake("cpu"), (fake("cpu"), [fake("cuda:0")]), None
    for node, value in zip(graph.graph.nodes, values, strict=True):
        node.meta["example_value"] = value
    assert devices_of(graph) == [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.mark.parametrize("what", ["caches", "dump", "ranks"])
def test_where_nothing_is_kept(what, monkeypatch, memory, tmp_path):
    options = {}
    if what == "caches":
        monkeypatch.setattr(remembered, "cache_folder", lambda: None)
    elif what == "ranks":
        monkeypatch.setattr(remembered, "default_store", lambda: (object(), 0))
    else:
        options["dump"] = str(tmp_path / "dump")
    once(norms, X, **options)
    assert not again(norms, X, **options)
    assert not list(memory.glob("graph-*"))


def test_a_fault_is_told_in_every_process(monkeypatch):
    def failing(self, match):
        raise RuntimeError("planted")

    with monkeypatch.context() as m:
        m.setattr("fusion_backend.decide.gate.Gate.decided", failing)
        with pytest.warns(RuntimeWarning, match="planted"):
            once(norms, X)
    assert not again(norms, X)
    assert again(norms, X)


@pytest.mark.parametrize("name", ["graph_text", "recipe_of"])
def test_a_failure_of_ours_costs_a_warning_and_no_fusion(name, monkeypatch):
    def failing(*args):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(remembered, name, failing)
    with pytest.warns(RuntimeWarning, match="decided graphs cannot be used.*planted"):
        (record,), _ = once(norms, X)
    assert any(s.fused for s in record.sites) and "planted" in record.faults[-1]
    assert not again(norms, X)


def test_a_pattern_that_cannot_be_traced_is_told_in_every_process():
    @fusion_backend.Pattern
    def remembered_branch(x: torch.Tensor, limit: float) -> torch.Tensor:
        return x.sin() if x.sum() > limit else x

    try:
        for _ in range(2):
            fusion_backend.reset()
            with pytest.warns(RuntimeWarning, match="remembered_branch"):
                assert not again(norms, X)
    finally:
        unregister("remembered_branch")


def test_what_cannot_be_compiled_is_forgotten(monkeypatch, memory):
    def compiled():
        torch._dynamo.reset()
        fusion_backend.reset()
        options = {"fusion.gate": "always"}
        with torch.no_grad():
            torch.compile(norms, backend="fusion", options=options)(X)
        return fusion_backend.report().graphs[0]

    with eager_kernels():
        assert not compiled().remembered and compiled().remembered
        with monkeypatch.context() as m, pytest.warns(RuntimeWarning, match="planted"):
            m.setattr(dynamo, "inductor_of_ours", lambda *given: planted)
            assert compiled().error == "RuntimeError: planted"
        assert not list(memory.glob("graph-*"))
        assert not compiled().remembered and compiled().remembered


def planted(*given):
    raise RuntimeError("planted")


def entry_of(memory):
    (file,) = memory.glob("graph-*.json")
    return file


def test_an_entry_that_is_cut_off_or_changed_is_decided_anew(memory):
    (record,), ((first, _),) = once(norms, X)
    operators, file = record.operators, entry_of(memory)
    text = file.read_text()
    for end in [*range(0, len(text), 997), len(text) - 1]:
        file.write_text(text[:end])
        _, ((graph, _),) = once(norms, X)
        assert graph.code == first.code
        assert file.read_text() == text
    kept = json.loads(text)
    changed = [kept | {"format": 0}, kept | {"recipe": [[["x", 99, 0, []]], {}]}, [], {}, 3]
    changed += [kept | {"ops": ["no_such_op"]}, kept | {"rules": ["no_such_rule"]}]
    changed += [{k: v for k, v in kept.items() if k != missing} for missing in kept]
    other = copy.deepcopy(kept)
    next(entry for entry in other["recipe"][0] if len(entry) > 4)[3] = "os.system"
    changed.append(other)
    for value in changed:
        file.write_text(json.dumps(value))
        (record,), ((graph, _),) = once(norms, X)
        assert not record.remembered and not record.faults and graph.code == first.code
        assert record.operators == operators


def test_a_folder_that_others_may_write_to_is_not_read(memory):
    once(norms, X)
    memory.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="decided graphs are not read"):
        assert not again(norms, X)


SECOND = """
import torch, fusion_backend

def fn(x):
    return torch.nn.functional.layer_norm(x.sin(), (16,)) + torch.softmax(x, -1)

def compiled(gm, inputs):
    return lambda *given: gm(*given)

import fusion_backend.frontends.dynamo as dynamo
dynamo.inductor_of_ours = lambda *given: compiled
torch.manual_seed(0)
options = {"fusion.gate": "always"}
result = torch.compile(fn, backend="fusion", options=options)(torch.randn(4, 16))
(graph,) = fusion_backend.report().graphs
print(graph.remembered, result.sum().item(), [str(site) for site in graph.sites])
"""


def test_a_second_process_remembers(tmp_path):
    """The first is forked from one that has imported everything; the second is new."""
    script = tmp_path / "second.py"
    script.write_text(SECOND)
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(traced.give(tmp_path / "cache"))}
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    first = output_of("-c", run, **folder)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | folder
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [out.splitlines()[-1].partition(" ") for out in (first, done.stdout)]
    assert [first for first, _, _ in told] == ["False", "True"]
    assert told[0][2] == told[1][2]
