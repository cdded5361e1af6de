"""A failure of ours at any stage leaves the model as if we had never been there, and says so;
others' stay theirs.
"""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import pipeline
from fusion_backend.compat import inductor
from fusion_backend.decide.gate import Gate
from fusion_backend.frontends import dynamo as backend
from fusion_backend.match.matcher import Matcher
from fusion_backend.reporting import report


def norm(x, y):
    return F.layer_norm(torch.exp((x + y) * 2), (8,))


def model(x, y):
    """A site in the graph, and a body without one."""
    return norm(x, y) + checkpoint(lambda x: x.sin().tril(), x, use_reentrant=False)


@pytest.fixture
def xy():
    return torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)


class Eager(OutputCode):
    """Stands for what Inductor makes of a graph."""

    def __init__(self, gm):
        self.gm, self._boxed_call = gm, True

    def __call__(self, inputs):
        given = list(inputs)
        inputs.clear()
        return self.gm(*given)


def broken(*args, **kwargs):
    raise RuntimeError("a bug of ours")


def breaks(compiles):
    """Inductor's compiler of one graph, where it works and where it does not; it spoils the graph
    first.
    """

    def compile(gm, inputs, **given):
        if compiles(given):
            return Eager(gm)
        for n in gm.graph.nodes:
            n.meta.clear()
        gm.meta["spoiled"] = True
        return broken()

    return compile


def spoils(gm, *args, **kwargs):
    """Inductor's passes change a graph and its bodies in place before they fail."""
    for m in gm.modules():
        if isinstance(m, fx.GraphModule):
            m.meta["spoiled"] = True
            for n in m.graph.nodes:
                n.meta.clear()
    broken()


STAGES = {
    "capture": (pipeline, "capture", broken),
    "read": (pipeline, "analyse", broken),
    "match": (Matcher, "candidates", broken),
    "decide": (Gate, "decide_all", broken),
    "rewrite": (pipeline, "rewrite", broken),
    "identity": (backend, "key_of", broken),
    "options": (backend, "with_identity", broken),
    "Inductor's passes": (inductor, "compile_fx", spoils),
    "Inductor": (inductor, "compile_fx_inner", breaks(lambda given: False)),
}


def state(gm: fx.GraphModule) -> list:
    """All that a compiler is given besides the values: nodes, their metadata, bodies, and what
    Dynamo has noted.
    """
    found = [(k, id(v)) for k, v in gm.meta.items()]
    for n in gm.graph.nodes:
        found += [
            (n.name, n.op, str(n.target), str(n.args), str(n.kwargs)),
            *((k, id(v)) for k, v in n.meta.items()),
        ]
    for name, child in gm.named_children():
        found += [name, *(state(child) if isinstance(child, fx.GraphModule) else [])]
    return found


def noted() -> list:
    context = TracingContext.get()
    kept = (
        context.fw_metadata,
        context.params_flat,
        context.output_strides,
        context.aot_graph_name,
    )
    return [*map(id, kept), len(context.guards_context.aotautograd_guards)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_is_compiled_as_if_we_had_never_been_there(xy, stage, monkeypatch):
    given, handed = [], []

    def plain(mode, options):
        def compile(gm, inputs):
            handed.append((gm, [*state(gm), *noted()], options, list(inputs)))
            return gm.forward

        compile.config = {}
        return compile

    def dynamo(gm, inputs):
        given.append((gm, [*state(gm), *noted()], {"max_autotune": False}, list(inputs)))
        return backend.fusion(gm, inputs, options={"fusion.gate": "always", "max_autotune": False})

    monkeypatch.setattr(backend, "inductor", plain)
    monkeypatch.setattr(*STAGES[stage])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = torch.compile(model, backend=dynamo)(*xy)
        torch.compile(lambda x, y: model(x, y), backend=dynamo)(*xy)
    torch.testing.assert_close(out, model(*xy))
    told = [str(w.message) for w in told if w.category is RuntimeWarning]
    assert len(told) == 1 and "please report this: RuntimeError: a bug of ours" in told[0]
    assert [g.error for g in fusion_backend.report().graphs] == ["RuntimeError: a bug of ours"] * 2
    assert not fusion_backend.report().fused
    assert "went to Inductor as it was: RuntimeError: a bug of ours" in str(fusion_backend.report())
    assert len(given) == len(handed) == 2
    for (gm, before, theirs, inputs), (got, after, options, same) in zip(
        given, handed, strict=True
    ):
        assert got is gm and after == before and options == theirs
        assert all(a is b for a, b in zip(inputs, same, strict=True))


def test_a_backward_that_cannot_be_compiled_runs_operator_by_operator(xy, monkeypatch):
    given = breaks(lambda given: not given.get("is_backward"))
    monkeypatch.setattr(inductor, "compile_fx_inner", given)
    compiled = torch.compile(norm, backend="fusion", options={"fusion.gate": "always"})
    with pytest.warns(RuntimeWarning, match="operator by operator.*a bug of ours") as told:
        out = compiled(*xy)
        grads = [torch.autograd.grad(compiled(*xy).sum(), xy[0])[0] for _ in range(2)]
    assert len([w for w in told if "a bug" in str(w.message)]) == 1
    torch.testing.assert_close(out, norm(*xy))
    torch.testing.assert_close(grads, [torch.autograd.grad(norm(*xy).sum(), xy[0])[0]] * 2)
    (record,) = fusion_backend.report().graphs
    assert record.error is None and record.backward_error == "RuntimeError: a bug of ours"
    assert "operator by operator" in str(fusion_backend.report())


def written_where(x, w, mask, v):
    h = F.layer_norm(x, (8,), w)
    y = h.clone()
    y[mask] = v
    return y


@pytest.mark.parametrize("where", ["pass", "graph"])
def test_what_plain_inductor_refuses_is_not_ours(where, monkeypatch):
    """Torch cannot trace the gradient of v: plain Inductor breaks the graph, and so do we, without
    a word.
    """
    if where == "pass":
        monkeypatch.setattr(pipeline, "rewrite", broken)
    x, v = torch.randn(4, 8, requires_grad=True), torch.randn((), requires_grad=True)
    args = [x, torch.ones(8), x > 0.5, v]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = torch.compile(written_where, backend="fusion", options={"fusion.gate": "always"})(
            *args
        )
    torch.testing.assert_close(out, written_where(*args))
    (record, *_) = fusion_backend.report().graphs
    assert "plain Inductor refuses the graph as well: DynamicOutputShapeException" in record.error


def test_the_error_is_plain_inductors(xy, monkeypatch):
    """Where both fail, the user sees what plain Inductor says."""

    def plain(mode, options):
        def compile(gm, inputs):
            raise NotImplementedError("Inductor's own limit")

        compile.config = {}
        return compile

    monkeypatch.setattr(backend, "inductor", plain)
    monkeypatch.setattr(inductor, "compile_fx_inner", breaks(lambda given: False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(Exception, match="Inductor's own limit"):
            torch.compile(norm, backend="fusion", options={"fusion.gate": "always"})(*xy)


def test_a_graph_that_dynamo_hands_over_again_is_told_once(xy, monkeypatch):
    """Its own record goes, not that of whoever came in between."""
    turns = iter("again")

    def again(*args):
        def compile(gm, inputs):
            report.add(report.GraphRecord(nodes=-1))  # another thread's
            with contextlib.suppress(StopIteration):
                next(turns)
                raise backend.RestartAnalysis
            return gm.forward

        return compile

    monkeypatch.setattr(backend, "inductor_of_ours", again)
    gm = fx.symbolic_trace(lambda x: x.sin())
    monkeypatch.setattr(
        backend.remembered,
        "fuse",
        lambda *given: (fx.symbolic_trace(lambda x: x.sin()), []),
    )
    for _ in range(5):
        with pytest.raises(backend.RestartAnalysis):
            backend.fusion(gm, [xy[0]])
    backend.fusion(gm, [xy[0]])
    assert [g.nodes for g in fusion_backend.report().graphs] == [-1] * 5 + [3, -1]
