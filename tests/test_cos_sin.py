"""cos and sin of positions: written to memory where many results are computed from them."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code

from fusion_backend.decide.neighbours import Neighbours
from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import fused_nodes
from tests.kernel_checks import randn
from tests.measured_cases import as_on_a_gpu, decided, told
from tests.spelled import leaves, rewritten

ALWAYS = {"fusion.gate": "always", "fusion.only": "cos_sin"}
B, H, N, D = 2, 16, 8, 16


def turned(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def layers(x, w, angle):
    """As in models of transformers: both in the dtype of x, for the queries of two layers."""
    cos, sin = (angle.cos() * 1.5).to(x.dtype), (angle.sin() * 1.5).to(x.dtype)
    for _ in range(2):
        q = turned((x @ w).view(B, N, H, D).transpose(1, 2), cos.unsqueeze(0), sin.unsqueeze(0))
        x = q.transpose(1, 2).reshape(B, N, H * D)
    return x


def inputs(dtype=torch.float32):
    return randn(B, N, H * D, dtype=dtype), randn(H * D, H * D, dtype=dtype), randn(1, N, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_is_computed_in_one_kernel(dtype):
    torch.compiler.reset()
    args = inputs(dtype)
    plain, before = run_and_get_code(torch.compile(layers), *args)
    torch.compiler.reset()
    with_tables = torch.compile(layers, backend="fusion", options=ALWAYS)
    got, after = run_and_get_code(with_tables, *args)
    computed = [code.count("std::cos") + code.count(".cos()") for code in (*before, *after)]
    assert computed == [2, 1]
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("function", ["cos", "sin"])
def test_gradients(function):
    (x,) = leaves((5, 8))
    fn = getattr(torch, function)
    gm = rewritten(fn, x)
    assert [str(n.target) for n in fused_nodes(gm)] == ["fusion.table.default"]
    dy = randn(5, 8)
    (want,) = torch.autograd.grad(fn(x), x, dy)
    (got,) = torch.autograd.grad(gm(x)[0], x, dy)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dynamic_size_is_refused(dynamic):
    """Inductor is told where each row begins, in numbers."""
    found = []

    def backend(gm, examples):
        collector = Collector(ALWAYS)
        out = collector(gm, examples)
        (site,), (graph,) = collector.report.sites, collector.graphs
        found.extend((site.reason, [str(n.target) for n in fused_nodes(graph)]))
        return out

    torch.compile(torch.cos, backend=backend, dynamic=dynamic)(randn(6, 8))
    reason, ops = found
    assert ("its size is dynamic" in reason) == dynamic
    assert ("fusion.table.default" in ops) != dynamic


def test_what_another_site_reads_is_in_memory():
    """Such as the cos that the kernel of norm_rotary takes."""
    graph = fx.Graph()
    angle, x = graph.placeholder("angle"), graph.placeholder("x")
    angle.meta["val"], x.meta["val"] = torch.empty(N, D), torch.empty(B, H, N, D)
    cos = graph.call_function(torch.ops.aten.cos.default, (angle,))
    cos.meta["val"] = angle.meta["val"]
    read = [graph.call_function(torch.ops.aten.mul.Tensor, (x, cos)) for _ in range(2)]
    for n in read:
        n.meta["val"] = x.meta["val"]
    match = SimpleNamespace(roots=[cos], interior=[], tensors={"x": angle})
    assert Neighbours(match, (), {}).computed_again == 2 * B * H * N * D
    assert Neighbours(match, (), {read[1]: match}).computed_again is None


@pytest.mark.parametrize("layers_of, taken", [(4, True), (3, False)])
def test_nothing_is_measured(layers_of, taken, monkeypatch, tmp_path):
    """With a judge that would measure: four queries of 4 million elements are enough."""

    def turned_all(x, angle):
        cos = angle.cos()
        return [x[i] * cos for i in range(layers_of)]

    x, angle = torch.empty(1, dtype=torch.bfloat16).expand(4, 4, 8, 2048, 64), randn(2048, 64)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        ((_, fused, reason),) = told(decided(turned_all, x, angle, measure_s=20), "cos_sin")
    assert fused == taken and ("too few" in reason) != taken


@pytest.mark.parametrize("ratio, taken", [(1.5, False), (0.7, True)])
def test_a_site_that_lost_reads_it_as_others_do(ratio, taken, monkeypatch, tmp_path):
    """Attention by hand, to whose scores it is added, may have a kernel that reads it."""

    def four(q, angle):
        bias = angle.cos().bfloat16()
        for _ in range(4):
            q = torch.softmax(q @ q.mT + bias, -1) @ q
        return q

    q, angle = torch.randn(8, 16, 256, 64).bfloat16(), randn(256, 256)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: ratio) as stub:
        record = decided(four, q, angle, gate="measure", skip=("softmax",))
    assert stub.asked
    assert [fused for _, fused, _ in told(record, "attention")] == [not taken] * 4
    ((_, fused, reason),) = told(record, "cos_sin")
    assert fused == taken, reason
