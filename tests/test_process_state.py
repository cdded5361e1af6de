"""State of the process: Inductor's is restored, tables of ours are bounded, and threads that
compile at once do not disturb one another.
"""

import gc
import importlib.metadata
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config

import fusion_backend
from fusion_backend import pipeline
from fusion_backend.compat import inductor
from fusion_backend.frontends import dynamo as backend
from fusion_backend.frontends import loading
from fusion_backend.match import prefilter as fitting
from fusion_backend.ops import registry
from fusion_backend.reporting import report as reporting
from fusion_backend.testing import collect
from tests.test_fallback import Eager

OPTIONS = {"fusion.gate": "always"}


def norm(x):
    return F.layer_norm(x.exp(), (8,))


def gate(x):
    return torch.sigmoid(x @ x.mT) * (x @ x.mT + 1) + F.softmax(x @ x.mT, -1)


@pytest.fixture
def no_inductor(monkeypatch):
    """Graphs run instead of being compiled by Inductor."""

    def plain(mode, options, *told):
        def compile(gm, inputs):
            return gm.forward

        compile.config = {}
        return compile

    monkeypatch.setattr(backend, "inductor", plain)
    monkeypatch.setattr(backend, "inductor_of_ours", plain)


def of_inductor() -> tuple:
    """What is changed while a graph of ours is compiled. Inductor adds operators of its own to the
    list when it first compiles a graph.
    """
    analyses = [getattr(inductor.kernel_wrap, name, None) for name in inductor.ANALYSES]
    realized = inductor.lowering.needs_realized_inputs
    return inductor.triton_kernel_wrapper_mutation in realized, analyses


def test_inductor_is_changed_only_while_a_graph_of_ours_is_compiled(monkeypatch):
    """The backward too, which is compiled when it first runs; graphs without a site are plain
    Inductor's.
    """
    seen = []

    def compile(gm, inputs, **given):
        seen.append((bool(given.get("is_backward")), of_inductor() != before))
        return Eager(gm)

    before = of_inductor()
    assert not before[0]
    assert not any(hasattr(analyse, "__wrapped__") for analyse in before[1])
    monkeypatch.setattr(inductor, "compile_fx_inner", compile)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx.__defaults__", (compile, *plain_defaults())
    )
    x = torch.randn(4, 8, requires_grad=True)
    out = torch.compile(norm, backend="fusion", options=OPTIONS)(x)
    assert of_inductor() == before
    out.sum().backward()
    assert of_inductor() == before
    torch.compile(norm, backend="fusion")(x).sum().backward()
    with fusion_backend.disable():
        torch.compile(lambda x: norm(x), backend="fusion", options=OPTIONS)(x).sum().backward()
    ours, plain = [(False, True), (True, True)], [(False, False), (True, False)]
    assert seen == ours + 2 * plain
    monkeypatch.setattr(inductor, "compile_fx_inner", lambda *args, **given: 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        torch.compile(lambda x: norm(x) + 1, backend="fusion", options=OPTIONS)(x)
    assert of_inductor() == before


def plain_defaults() -> tuple:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx.__defaults__[1:]


def test_a_second_thread_waits_until_all_patterns_are_loaded(monkeypatch):
    started, may_end = threading.Event(), threading.Event()

    class Slow:
        name = value = "slow"

        def load(self):
            loading.patterns()  # it may ask for them itself
            started.set()
            assert may_end.wait(10)
            registry.FUSION_RULES["slow"] = None

    monkeypatch.setattr(loading, "LOADED", [])
    monkeypatch.setattr(registry, "FUSION_RULES", dict(registry.FUSION_RULES))
    monkeypatch.setattr(loading, "FUSION_RULES", registry.FUSION_RULES)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Slow()])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(loading.patterns)
        assert started.wait(10)
        second = pool.submit(loading.patterns)
        assert not second.done() and threading.Event().wait(0.05) is False and not second.done()
        may_end.set()
        assert None in first.result() and None in second.result()


def test_two_threads_compile_different_models_at_once(no_inductor):
    models = [norm, gate, lambda x: norm(x) * 2, lambda x: gate(x) * 2]
    xs = [torch.randn(8, 8) for _ in models]
    ready = threading.Barrier(len(models))
    wrapped = [torch.compile(m, backend="fusion", options=OPTIONS) for m in models]

    def run(m, x):
        ready.wait()
        return m(x)

    with ThreadPoolExecutor(len(models)) as pool:
        for out, m, x in zip(pool.map(run, wrapped, xs), models, xs, strict=True):
            torch.testing.assert_close(out, m(x))
    report = fusion_backend.report()
    assert [g.error for g in report.graphs] == [None] * 4 and gc.isenabled()
    alone = [
        sorted(s.pattern for s in fusion_backend.explain(m, xs[0], options=OPTIONS).fused)
        for m in models
    ]
    assert sorted(sorted(s.pattern for s in g.sites if s.fused) for g in report.graphs) == sorted(
        alone
    )


def sizes() -> dict[str, int]:
    """The size of each table of ours that outlives a graph."""
    known = loading.patterns()
    return {
        "report": len(reporting.REPORT.graphs),
        "warnings": len(reporting.WARNED),
        "forms": len(fitting.KNOWN),
        "analyses": sum(map(len, inductor.ANALYSED.values())),
        "outcomes": sum(len(p.memo.get("outcomes", ())) for p in known),
        "memos": sum(len(p.memo) for p in known),
        "patterns": len(known),
    }


def test_100_resets_leave_nothing_behind(no_inductor, monkeypatch):
    monkeypatch.setattr(reporting, "MAX_GRAPHS", 20)
    monkeypatch.setattr(reporting, "MAX_WARNINGS", 20)
    x = torch.randn(4, 8)
    (gm,) = collect(norm, x).sources
    found = []
    for i in range(100):
        torch.compiler.reset()
        if i % 25:  # Dynamo takes most of the time
            backend.fusion(gm, [x], options=OPTIONS)
        else:
            torch.compile(norm, backend="fusion", options=OPTIONS)(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reporting.warn_once(f"graph {i}", "…")
        if i in (40, 99):
            gc.collect()
            found.append((sizes(), sum(type(o) is torch.fx.Graph for o in gc.get_objects())))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= found[0][1] + 4  # graphs alive
    report = fusion_backend.report()
    assert (len(report.graphs), report.dropped) == (20, 80)
    assert (
        "80 older graphs were dropped from the report" in str(report)
        and '"dropped": 80' in report.to_json()
    )
    assert list(reporting.WARNED) == [f"graph {i}" for i in range(80, 100)]
    fusion_backend.reset()
    assert not report.graphs and not report.dropped


def test_forms_make_room_between_templates_only(monkeypatch):
    monkeypatch.setattr(fitting, "KNOWN", {})
    monkeypatch.setattr(fitting, "REMEMBERED", 2)
    (p, *_) = loading.patterns()
    from fusion_backend.match.templates import Template, templates

    for _ in range(3):
        for t in templates(p):
            fresh = Template(p, t.kinds, t.roots, t.size, t.line).skeletons
            bits = [f.bit for f in set(fresh.values())]
            assert len(bits) == len(set(bits)) == len(fitting.KNOWN)


def test_analyses_are_bounded(monkeypatch):
    monkeypatch.setattr(inductor, "REMEMBERED", 3)
    calls = []

    def kernel(): ...

    def analyse(kernel, kwargs, descriptors):
        calls.append(kwargs)
        return []

    inductor.ANALYSED[kernel] = {}
    remembered = inductor.analysed_once(analyse)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4)
    for n in (0, 1, 2, 3, 4, 4):
        remembered(kernel, {"X": x, "n": n}, {})
        assert len(inductor.ANALYSED[kernel]) <= 3
    assert len(calls) == 5


THREADS = """
import threading, torch
from fusion_backend import pipeline
from fusion_backend.frontends import dynamo as backend
from fusion_backend.frontends import loading
ready, found = threading.Barrier(4), []
def work():
    ready.wait()
    torch.compile(torch.sin, backend=backend.fusion, options={"fusion.gate": "never"})
    found.append(len(backend.patterns()))
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(found) == 4 and len(set(found)) == 1 and found[0] > 10, found
assert torch.compile(torch.sin, backend="fusion")
"""


def test_four_threads_that_compile_first_at_once():
    """As docs/debugging.md has it: by name torch would load the entry point twice. The patterns are
    loaded once.
    """
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=300)


def test_the_garbage_collector_is_left_alone(no_inductor, monkeypatch):
    seen = []
    real = pipeline.capture
    monkeypatch.setattr(pipeline, "capture", lambda gm: seen.append(gc.isenabled()) or real(gm))
    torch.compile(norm, backend="fusion", options=OPTIONS)(torch.randn(4, 8))
    gc.disable()
    try:
        torch.compile(gate, backend="fusion", options=OPTIONS)(torch.randn(8, 8))
        assert seen == [True, False] and not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def no_cache():
    """Every graph reaches Inductor's compiler."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield
