"""Cosines and sines that many elements are computed from are written to memory once."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_backend
from fusion_backend.compat import inductor as compat
from fusion_backend.frontends import dynamo
from fusion_backend.rewrite import in_memory
from fusion_backend.rewrite.in_memory import keep_in_memory
from tests.eager_kernels import eager_kernels
from tests.without_interpreter import printed_by

S, D, HEADS = 4, 8, 16
x, y = torch.randn(S, D), torch.randn(HEADS, S, D)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """CPU tensors pass for those of a GPU, and 512 elements are many."""
    monkeypatch.setattr(in_memory, "on_gpu", lambda n: True)
    monkeypatch.setattr(in_memory, "MANY", S * D * HEADS)


def test_on_a_cpu_nothing_is_kept(monkeypatch):
    assert kept(rotary, *queries())
    monkeypatch.undo()
    monkeypatch.setattr(in_memory, "MANY", S * D * HEADS)
    assert not kept(rotary, *queries())


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turned(q, cos, sin):
    return q * cos[:, None] + half(q) * sin[:, None]


def rotary(q, freqs):
    angles = torch.cat((freqs, freqs), -1)
    return turned(q, angles.cos().to(q.dtype), angles.sin().to(q.dtype))


def kept(fn, *inputs, symbolic=False):
    """(kept, the sentence) of each value of a traced function."""
    table = select_decomp_table()
    gm = make_fx(fn, table, "symbolic" if symbolic else "fake")(*inputs)
    told = keep_in_memory(gm)
    force = torch.ops.prims.inductor_force_stride_order.default
    values = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=force)]
    for value in values:  # all that read it, read it from memory
        assert len(value.users) == 1
    gm.graph.lint()
    torch.testing.assert_close(gm(*inputs), fn(*inputs))
    assert len(told) == len(values)
    return [*zip(values, told, strict=True)]


def queries(dtype=torch.bfloat16, heads=HEADS):
    return torch.randn(1, heads, S, D, dtype=dtype), torch.randn(1, S, D // 2)


def test_both_are_kept_after_the_cast_and_say_for_what():
    found = kept(rotary, *queries())
    assert [v.meta["val"].dtype for v, _ in found] == [torch.bfloat16] * 2
    assert [told.split(" at ")[0] for _, told in found] == ["cos", "sin"]
    assert all(f"{S * D * HEADS} elements of other results" in told for _, told in found)
    assert all(told.endswith(f"are computed from its {S * D}") for _, told in found)


def test_several_readers_count_together():
    def layers(q, k, angles):
        cos, sin = angles.cos(), angles.sin()
        return turned(q, cos, sin), turned(k, cos, sin)

    q, k, angles = y[None, : HEADS // 2], y[None, HEADS // 2 :], x[None]
    assert not kept(lambda q, angles: layers(q, q[:, :1], angles)[0], q[:, :-1], angles)
    assert len(kept(layers, q, k, angles)) == 2


def test_a_wider_dtype_is_not_kept():
    def fn(x, y):
        return x.cos().float()[None] * y

    ((value, _),) = kept(fn, torch.randn(S, D).bfloat16(), torch.randn(HEADS, S, D))
    assert value.target == torch.ops.aten.cos.default


def with_cosines(x, y):
    cosines = x.cos()
    return cosines, cosines * y


def in_one_kernel(x, y):
    cosines = x.cos()
    return cosines * y[:8] + cosines * y[8:]


NEAR_MISSES = {
    "a result, which is in memory": (with_cosines, x, y),
    "another function": (lambda x, y: x.tan() * y, x, y),
    "few elements": (lambda x, y: x.cos() * y[:-1], x, y),
    "not so often": (lambda x, y: x.cos() * y, torch.randn(64, S, D), torch.randn(7, 64, S, D)),
    "as many elements": (lambda x, y: x.cos() * y + y.sin(), torch.randn(HEADS, S, D), y),
    "a sum of it": (lambda x, y: x.cos().sum(-1, keepdim=True) * y, x, y),
    "nothing, by an operator with two results": (lambda x: torch.frexp(x.cos())[0], x[:0]),
    "one kernel": (in_one_kernel, x, y),
    "a sum under it": (lambda y: y.sum(-1, keepdim=True).cos() * y, torch.randn(64, 64)),
    "a sum of a view": (lambda x, y: x.cos().expand(HEADS, S, D).sum((0, 1)), x, y),
    "a product of it": (lambda x, y: (x.cos() @ x.t()).repeat(1, 2)[None] * y, x, y),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses(case):
    assert not kept(*NEAR_MISSES[case])


def test_of_what_is_computed_from_two_values_the_first_is_kept():
    ((value, _),) = kept(lambda x, y: (x.cos() + x.tan()) * y, x, y)
    assert value.target == torch.ops.aten.cos.default


def test_a_sum_of_as_many_elements_does_not_matter():
    assert len(kept(lambda x, y: x.cumsum(0).cos() * y, x, y)) == 1


def test_in_front_of_a_view_whose_size_may_vary():
    def fn(q, angles, w):
        return F.rms_norm(angles.cos().view(q.shape[1], -1) * q, (4,), w)

    seen = []
    q = torch.randn(16, 8, 4)
    torch._dynamo.mark_dynamic(q, 1)
    inputs = q, torch.arange(32.0), torch.randn(4)
    fused = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    with eager_kernels(lambda gm, options: seen.append(gm)):
        torch.testing.assert_close(fused(*inputs), fn(*inputs))
    force = torch.ops.prims.inductor_force_stride_order.default
    (value,) = seen[0].graph.find_nodes(op="call_function", target=force)
    assert value.args[0].target == torch.ops.aten.cos.default and value.args[1] == [1]


def test_of_a_size_that_may_vary_nothing_is_kept():
    assert kept(rotary, *queries()) and not kept(rotary, *queries(), symbolic=True)


def test_what_is_too_large_to_keep_is_computed_again(monkeypatch):
    monkeypatch.setattr(in_memory, "LARGEST", S * D - 1)
    assert not kept(rotary, *queries())


def model(q, freqs, w):
    c = freqs.cos()
    c.mul_(2.0)  # written to in place
    angles = torch.cat((c, c), -1)
    q = turned(F.rms_norm(q, (D,), w), angles.cos().to(q.dtype), angles.sin().to(q.dtype))
    return q, angles


@pytest.mark.parametrize("generated", [False, True], ids=["operator by operator", "C++"])
def test_results_and_gradients(generated):
    inputs = [t.requires_grad_() for t in (*queries(torch.float32), torch.randn(D))]
    fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    found = []
    for run in (fused, model):
        uncached = torch._functorch.config.patch(enable_autograd_cache=False)
        with uncached if generated else eager_kernels():
            results = run(*inputs)
            found.append(torch.autograd.grad(sum(r.sin().sum() for r in results), inputs))
    torch.testing.assert_close(*found)
    report = fusion_backend.report()
    (graph,) = report.graphs
    assert not graph.faults
    # forward and backward
    assert sum(told.startswith(f"cos at {__file__}") for told in graph.in_memory) >= 2
    assert "written to memory once, instead of computed" in report.text()


def test_without_a_fused_site_the_graph_is_inductors():
    torch.compile(rotary, backend="fusion")(*queries())
    assert not fusion_backend.report().graphs[-1].in_memory


def test_a_failure_costs_nothing_else(monkeypatch):
    def fails(gm):
        raise ValueError("planted")

    monkeypatch.setattr(dynamo, "keep_in_memory", fails)
    q, freqs = queries(torch.float32)
    inputs = q, freqs, torch.randn(D)
    fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    with eager_kernels(), pytest.warns(RuntimeWarning, match="ValueError: planted"):
        torch.testing.assert_close(fused(*inputs), model(*inputs))
    (graph,) = fusion_backend.report().graphs
    assert "planted" in graph.faults[0] and any(s.fused for s in graph.sites)


def test_of_a_graph_that_fell_back_nothing_is_told(monkeypatch):
    def refused(*given, **options):
        raise RuntimeError("planted")

    monkeypatch.setattr(compat, "compile_fx_inner", refused)
    q, freqs = queries(torch.float32)
    inputs = q, freqs, torch.randn(D)
    fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    with eager_kernels(), pytest.warns(RuntimeWarning, match="RuntimeError: planted"):
        torch.testing.assert_close(fused(*inputs), model(*inputs))
    (graph,) = fusion_backend.report().graphs
    assert "planted" in graph.error and not graph.in_memory


SCRIPT = """
import json, torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.apart import begun_apart
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.rewrite import in_memory
from tests.test_in_memory import rotary

in_memory.on_gpu = lambda n: True
inputs = torch.randn(64, 8, 4096, 8).bfloat16(), torch.randn(1, 4096, 4)
with cpu_tensors_pass(), code_for_cuda() as codes, torch.no_grad():
    for keep in (False, True):
        gm = make_fx(rotary, select_decomp_table(), tracing_mode="fake")(*inputs)
        assert not keep or in_memory.keep_in_memory(gm)
        begun_apart(gm, inputs)()(*inputs)
print(json.dumps(codes))
"""


def test_in_the_code_for_a_gpu_one_small_kernel_computes_them():
    plain, ours = printed_by(SCRIPT)
    assert sizes_of_sines(plain) == [64 * 8 * 4096 * 8]
    assert sizes_of_sines(ours) == [4096 * 8]


def sizes_of_sines(code: str) -> list[int]:
    """How many elements the kernels write that compute a sine."""
    kernels = [k for k in code.split("async_compile.triton(") if "tl_math.sin(" in k]
    return [int(n) for k in kernels for n in re.findall(r"xnumel = (\d+)", k)]
