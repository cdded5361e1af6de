"""Calls that return their argument, or a view of it, and writes in between, at the edge of what is
replaced.
"""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import collect, fused_nodes

IN_PLACE = (operator.iadd, operator.imul, "sub_")
SAME = {
    "contiguous": lambda t: t.contiguous(),
    "type_as": lambda t: t.type_as(t),
    "to": lambda t: t.to(t.dtype),
    "twice": lambda t: t.type_as(t).type_as(t),
    "mixed": lambda t: t.type_as(t).contiguous().to(t.dtype),
    "dropout": lambda t: F.dropout(t, 0.5, training=False),
    "clone": lambda t: t.clone(),
}
same = pytest.mark.parametrize("same", SAME.values(), ids=SAME)


def inside(x, y, same):
    return (same(x + y) * 1.5,)


def both_names(x, y, same):
    t = (x + y) * 1.5
    return same(t) + 1.0, t


def early_name_last(x, y, same):
    t = (x + y) * 1.5
    u = same(t)
    return u.sin(), t.cos(), u, t


def argument(x, y, same):
    t = same(x.sin())
    return (t + y) * 1.5, t


@same
@pytest.mark.parametrize("code", [inside, both_names, early_name_last, argument])
def test_every_name_keeps_its_value(code, same):
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    collector = collect(lambda x, y: code(x, y, same), x, y, dynamic=False)
    assert len(fused_nodes(collector.graphs[0])) == 1, collector.report
    got = torch.compile(lambda x, y: code(x, y, same), backend=collector, dynamic=False)(x, y)
    for g, w in zip(got, code(x, y, same), strict=True):
        torch.testing.assert_close(g, w)


def interior(x, y, w):
    t = F.layer_norm(x + y, (4,), w)
    t[..., :1] *= 2
    return F.silu(t.transpose(0, 1).transpose(0, 1))


def first_result(x, y, w):
    h = x + y
    h[..., :1] = 0
    return F.layer_norm(h, (4,), w), h


def first_result_later(x, y, w):
    h = x + y
    out = F.layer_norm(h, (4,), w)
    h[..., :1] = 0
    return out, h


def argument_between_results(x, y, w):
    h, w = x + y, w * 1.5
    out = F.layer_norm(h, (4,), w)
    w[:2] = 0
    return out * w, h


def normalised_twice(x, y, w):
    t = F.group_norm(x.view(3, 4), 2, w)
    t[..., :1] *= 2
    return t.view(3, 4).exp()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "code", [interior, first_result, first_result_later, argument_between_results, normalised_twice]
)
def test_what_is_written_in_between(code, grad):
    """Whatever fuses, the values are those of eager; and the gradients, where eager has them."""
    given = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)]
    args, again = ([t.clone().requires_grad_(grad) for t in given] for _ in range(2))
    options = {"fusion.gate": "always"}
    got = torch.compile(code, backend=Collector(options), dynamic=False)(*args)
    wanted = code(*again)
    got, wanted = (out if isinstance(out, tuple) else (out,) for out in (got, wanted))
    torch.testing.assert_close(got, wanted)
    try:
        gradients = torch.autograd.grad(sum(o.sin().sum() for o in wanted), again) if grad else ()
    except RuntimeError:  # what eager refuses has no right answer
        return
    torch.testing.assert_close(
        torch.autograd.grad(sum(o.sin().sum() for o in got), args) if grad else (), gradients
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_and_wide_in_place(dtype, grad):
    """bf16 += fp32 computes in fp32 and rounds to bf16, each time; gradients are the same."""

    def fn(x, w, d):
        y = F.linear(x, w)
        z = y.view_as(y)
        y += d
        z *= 1 + d
        y.sub_(d, alpha=0.5)
        return F.layer_norm(z, z.shape[-1:]), y

    x, w, d = torch.randn(8, 16, dtype=dtype), torch.randn(16, 16, dtype=dtype), torch.randn(8, 16)
    args = [t.requires_grad_(grad) for t in (x, w, d)]
    only = {"fusion.only": "layer_norm"}
    (gm,) = collect(fn, *args, dynamic=False, options=only).graphs
    assert not any(n.target in IN_PLACE for n in gm.graph.nodes) and fused_nodes(gm)
    wanted = fn(*args)
    named = {n.name.strip("l_"): n.name for n in gm.graph.nodes if n.op == "placeholder"}
    got = gm(*(dict(x=x, w=w, d=d)[name] for name in named))
    assert [t.dtype for t in got] == [t.dtype for t in wanted] and torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0])
    for one, other in zip(
        torch.autograd.grad(got[1].sum(), args) if grad else (),
        torch.autograd.grad(wanted[1].sum(), args) if grad else (),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_wider_than_fp32_in_place_is_left_as_it_is():
    """And so is what the storage of a slice holds."""

    def fn(x, w, d):
        y = F.linear(x, w)
        y += d.double()
        z = F.linear(x, w).bfloat16()
        z[:4] += d[:4]
        return F.layer_norm(y, (16,)) + F.layer_norm(z, (16,))

    inputs = torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16)
    (gm,) = collect(fn, *inputs, dynamic=False).graphs
    assert sum(n.target in IN_PLACE for n in gm.graph.nodes) == 2, gm.graph


def test_dropout_in_place_draws_as_before():
    def fn(x, y):
        t = (x + y) * 1.5
        F.dropout(t, 0.5, True, inplace=True)
        return t.mul_(2)

    x, y = torch.randn(64, 64), torch.randn(64, 64)
    collector = Collector({"fusion.gate": "always"})
    torch.manual_seed(0)
    got = torch.compile(fn, backend=collector, dynamic=False)(x, y)
    torch.manual_seed(0)
    torch.testing.assert_close(got, fn(x, y))
    assert len(fused_nodes(collector.graphs[0])) == 1
    assert "dropout_" in str(collector.graphs[0].graph)


@pytest.mark.parametrize("form", ["cast first", "rows first"])
def test_a_loss_reads_the_narrow_logits(form):
    """Not the upcast copy, which would be kept for backward."""

    def fn(logits, target):
        rows = (
            logits.float().view(-1, 100) if form == "cast first" else logits.view(-1, 100).float()
        )
        return F.cross_entropy(rows, target.view(-1))

    logits = torch.randn(2, 8, 100, dtype=torch.bfloat16, requires_grad=True)
    graph = collect(fn, logits, torch.zeros(2, 8, dtype=torch.int64)).graphs[0]
    (site,) = fused_nodes(graph)
    assert site.args[0].meta["example_value"].dtype == torch.bfloat16 and "float_1" not in str(
        graph.graph
    )


TURNED = {
    "permuted": lambda t: t.permute(0, 2, 1).permute(0, 2, 1),
    "transposed": lambda t: t.transpose(1, 2).mT,
    "and copied": lambda t: t.mT.contiguous().mT,
    "not at all": lambda t: t,
}


@pytest.mark.parametrize("turn", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize("grad", [False, True])
def test_a_site_reads_what_another_gives_turned_and_turned_back(turn, grad):
    """The norm's site ends where it is turned back; its reader may name the value before
    (SqueezeBERT).
    """

    def f(x, w, u, c):
        t = turn(F.layer_norm(x, (8,), w))
        return F.gelu(F.linear(t, u, c)), torch.tanh(F.linear(t[:, 0], u, c)), t.sum(1)

    inputs = [torch.randn(s) for s in ((2, 5, 8), (8,), (6, 8), (6,))]
    collector = collect(f, *inputs)
    assert [n.meta["fusion"] for n in fused_nodes(collector.graphs[0])] == [
        "layer_norm",
        "linear_act",
        "linear_act",
    ]
    results = []
    for fn in (torch.compile(f, backend=collector), f):
        leaves = [x.clone().requires_grad_(grad) for x in inputs]
        out = fn(*leaves)
        results.append(
            [*out, *(torch.autograd.grad(sum(o.sin().sum() for o in out), leaves) if grad else ())]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "root", [lambda x, y: ((x + y) * 2).exp(), lambda x, y: (x + y) * 2], ids=["exp", "mul"]
)
def test_a_cast_of_the_result_is_left(root):
    """Under a cast the operators are the same, the pattern's result is not."""
    x, y = torch.randn(2, 8, 16, dtype=torch.bfloat16)
    collector = collect(lambda x, y: root(x, y).float(), x, y)
    (node,) = fused_nodes(collector.graphs[0])
    (cast,) = node.users
    sites = [s for s in collector.report.sites if node.target.__name__.startswith(f"{s.pattern}.")]
    assert len(sites) == 1, collector.report
    assert cast.meta["example_value"].dtype == torch.float32
    got = torch.compile(
        lambda x, y: root(x, y).float(), backend=Collector({"fusion.gate": "always"})
    )(x, y)
    assert got.dtype == torch.float32


def written_between(x, y):
    t = x + y
    x.mul_(2.0)
    return t * 1.5


def written_before_it_is_read(x, y):
    t = y.sin() + y
    x.mul_(2.0)
    return t * x


def written_behind(x, y):
    out = (x + y) * 1.5  # for whose gradient plain autograd keeps neither
    x.mul_(2.0)
    return out


def assigned_behind(x, y):
    t = y.sin()
    out = t.softmax(-1)  # whose gradient reads the result alone in plain autograd
    t[..., :2] = 0.0
    return out + x


def written_under_no_grad(x, y):
    t = y * 2.0
    with torch.no_grad():
        t.add_(1.0)
    return F.layer_norm(t, (4,)) + x


WRITES = {
    written_between: "an argument may be written to in between, at ",
    written_behind: "an argument that the backward reads is written to afterwards, at ",
    assigned_behind: "an argument that the backward reads is written to afterwards, at ",
    written_before_it_is_read: None,
    written_under_no_grad: None,
}


@pytest.mark.parametrize("code, reason", WRITES.items(), ids=[code.__name__ for code in WRITES])
def test_writes_around_a_site_in_training(code, reason):
    def step(code):
        x, y = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4).cumsum(1).requires_grad_()
        out = code(x, y)
        (out * out.detach().sin()).sum().backward()
        return out.detach(), x, y.grad

    collector = Collector({"fusion.gate": "always"})
    for got, want in zip(step(torch.compile(code, backend=collector)), step(code), strict=True):
        torch.testing.assert_close(got, want)
    (site,) = collector.report.sites
    assert site.fused == (reason is None) and (site.fused or site.reason.startswith(reason)), (
        collector.report
    )


def read_before(x, w, b):
    y = F.linear(x, w, b).relu()
    early = y + 1
    return y[None][0], early


def older_name_read_before(x, w, b):
    y = F.linear(x, w, b)
    z = y.relu_()
    early = y.detach() + 1
    return z[None][0], early


def older_name_read_behind(x, w, b):
    y = F.linear(x, w, b)
    z = y.relu_()[None][0]
    return z.to(torch.bfloat16), y.detach() + 1


@pytest.mark.parametrize("code", [read_before, older_name_read_before, older_name_read_behind])
def test_a_value_that_several_nodes_have(code):
    """A view of a view is the result of relu again, and is the last node with this value."""
    x, w, b = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True), torch.randn(4)
    collector = Collector({"fusion.gate": "always"})
    got = torch.compile(code, backend=collector)(x, w, b)
    torch.testing.assert_close(got, code(x, w, b))
    assert [site.pattern for site in collector.report.fused] == ["linear_act"], collector.report


def test_code_of_a_new_graph_is_generated_when_it_is_read(monkeypatch):
    """As that of Dynamo's graph: Inductor's passes say several times that they have changed it."""
    generated, python_code = [], fx.Graph.python_code

    def recorded(graph, *args, **kwargs):
        generated.append(graph)
        return python_code(graph, *args, **kwargs)

    (graph,) = collect(lambda x: F.layer_norm(x, (8,)), torch.randn(4, 8)).graphs
    assert len(fused_nodes(graph)) == 1
    monkeypatch.setattr(fx.Graph, "python_code", recorded)
    graph.recompile()
    assert not generated
    assert "fusion" in graph.code and generated
