"""What attention reads through a view, and others read as well, is written to memory once."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_backend
from fusion_backend.frontends import dynamo
from fusion_backend.rewrite import attention_inputs
from fusion_backend.rewrite.attention_inputs import keep_inputs_of_attention
from tests.test_attention import by_hand
from tests.without_interpreter import printed_by

pytestmark = pytest.mark.usefixtures("eager_kernels")

UNCACHED = torch._inductor.config.patch(force_disable_caches=True)

B, S, D = 2, 6, 8


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(attention_inputs, "on_gpu", lambda n: True)


def attend(q):
    return F.scaled_dot_product_attention(q, q * 2, q * 3)


def heads(x):
    """As a batch of heads, which are cut from the width and stacked."""
    return torch.cat(x.split(D // 2, -1), 0)


def residual(x):
    q = heads(x)
    return q + attend(q[:, None])[:, 0]


def of_a_part(x):
    q = x.sin()
    return attend(q[:, :, : D // 2].unsqueeze(1)).sum() + q


def of_a_view(x):
    q = heads(x)
    return q.view(B, -1).exp(), attend(q.view(2, B, S, D // 2))


def side_by_side(x):
    """As residual, with the heads side by side again."""
    q, k = heads(x), x[:, None, :, : D // 2].repeat(2, 1, 1, 1)
    y = q + F.scaled_dot_product_attention(q[:, None], k, k)[:, 0]
    return torch.cat(y.split(len(x), 0), -1).sum(-1)


def of_itself(x):
    q = heads(x)[:, None]
    return F.scaled_dot_product_attention(q, q, q)


def kept(fn, *inputs):
    gm = make_fx(fn, select_decomp_table(), tracing_mode="fake")(*inputs)
    return gm, keep_inputs_of_attention(gm)


def x(requires_grad=False):
    return torch.randn(B, S, D, requires_grad=requires_grad)


@pytest.mark.parametrize("fn", [residual, of_a_part, of_a_view, of_itself])
def test_a_value_that_others_read_is_kept(fn):
    given = x()
    gm, told = kept(fn, given)
    (forced,) = (n for n in gm.graph.nodes if "force_stride_order" in str(n.target))
    (source,) = forced.all_input_nodes
    assert told == [f"a value at {source.name}, which attention and others read"]
    assert {*source.users} == {forced}
    torch.testing.assert_close(gm(given), fn(given))


OTHERS = {
    "nobody else reads it": lambda x: F.scaled_dot_product_attention(
        heads(x)[:, None], *(x[:, None, :, : D // 2].repeat(2, 1, 1, 1),) * 2
    ).exp(),
    "an argument": lambda x: attend(x[:, None])[:, 0] + x,
    "a product": lambda x: (lambda q: attend(q[:, None])[:, 0] + q)(x @ x.new_ones(D, D)),
    "a reduction": lambda x: (lambda q: attend(q[:, None])[:, 0] + q)(x.cumsum(-1)),
    "no view": lambda x: (lambda q: attend(q) + q)(torch.cat((x[:, None], x[:, None]), 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_inductor(name):
    _, told = kept(OTHERS[name], x())
    assert not told


def test_on_a_cpu_and_with_dynamic_sizes_nothing_is_kept(monkeypatch):
    gm = make_fx(residual, select_decomp_table(), tracing_mode="symbolic")(x())
    assert not keep_inputs_of_attention(gm)
    monkeypatch.undo()
    assert not kept(residual, x())[1]


def model(x):
    q = heads(x)
    return q + by_hand(*(q[:, None],) * 3)[:, 0]


@UNCACHED
def test_with_a_fused_site_it_is_told_and_gradients_are_right():
    given = x(requires_grad=True)
    fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    torch.testing.assert_close(fused(given), model(given))
    ((mine,), (its,)) = (torch.autograd.grad(f(given).sum(), given) for f in (fused, model))
    torch.testing.assert_close(mine, its)
    (graph,) = fusion_backend.report().graphs
    assert any("attention and others read" in told for told in graph.in_memory)
    assert "written to memory once" in str(fusion_backend.report())


@UNCACHED
def test_a_failure_costs_nothing_else(monkeypatch):
    def fails(gm):
        raise ValueError("planted")

    monkeypatch.setattr(dynamo, "keep_inputs_of_attention", fails)
    given = x()
    fused = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    with pytest.warns(RuntimeWarning, match="inputs of attention .* planted"):
        torch.testing.assert_close(fused(given), model(given))
    (graph,) = fusion_backend.report().graphs
    assert any(s.fused for s in graph.sites)


SCRIPT = """
import json, torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.apart import begun_apart
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.rewrite import attention_inputs
from tests.test_attention_inputs import of_itself, side_by_side

attention_inputs.on_gpu = lambda n: True
x = torch.randn(64, 128, 8).bfloat16()
with cpu_tensors_pass(), code_for_cuda() as codes, torch.no_grad():
    for fn, keep in [(f, keep) for f in (side_by_side, of_itself) for keep in (False, True)]:
        gm = make_fx(fn, select_decomp_table(), tracing_mode="fake")(x)
        assert not keep or attention_inputs.keep_inputs_of_attention(gm)
        begun_apart(gm, (x,))()(x)
print(json.dumps(codes))
"""


KERNEL = re.compile(r"^def triton_.*?^\'\'\'", re.DOTALL | re.MULTILINE)


def test_in_the_code_for_a_gpu_the_heads_are_stacked_once():
    """The last kernel reads them, instead of each part; and three arguments are one tensor."""
    plain, ours, thrice, once = ([*KERNEL.findall(code)] for code in printed_by(SCRIPT))
    assert [kernels[-1].count("tl.load(") for kernels in (plain, ours)] == [6, 4]
    assert ["".join(kernels).count("tl.store(") for kernels in (thrice, once)] == [3, 1]
