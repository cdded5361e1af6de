"""Attention in training on a GPU shares no plan of cuDNN with other attention, where torch can
confuse them. tests/gpu/test_attention_plans.py shows that it can.
"""

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import own_plan, rule
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_backend.testing import collect
from tests.test_attention import by_hand, repeat_kv

B, H, S, D = 3, 2, 8, 16
OURS, TORCHS = "fusion.sdpa_of_own_plan.default", "aten.scaled_dot_product_attention.default"


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(rule, "on_gpu", lambda t: True)
    monkeypatch.setattr(rule, "PLANS_CAN_BE_CONFUSED", True)


def tensors(kv_heads=H, dtype=torch.bfloat16, grad=True):
    made = [torch.randn(B, S, heads, D, dtype=dtype) for heads in (H, kv_heads, kv_heads)]
    return [t.transpose(1, 2).requires_grad_(grad) for t in made]


def grouped(q, k, v):
    return by_hand(q, *(repeat_kv(t, H) for t in (k, v)))


def attention_in(fn, *inputs):
    graphs = collect(fn, *inputs).graphs
    names = [str(n.target) for g in graphs for n in g.graph.nodes]
    return [name for name in names if name in (OURS, TORCHS)]


@pytest.mark.parametrize(
    ("fn", "kv_heads", "grad", "name"),
    [(by_hand, H, True, OURS), (by_hand, H, False, TORCHS), (grouped, 1, True, TORCHS)],
    ids=["training", "inference", "grouped"],
)
def test_attention_in_training_has_a_plan_of_its_own(on_gpu, fn, kv_heads, grad, name):
    assert attention_in(fn, *tensors(kv_heads, grad=grad)) == [name]


def test_a_torch_that_knows_its_plans_gets_the_call_as_it_is(on_gpu, monkeypatch):
    monkeypatch.setattr(rule, "PLANS_CAN_BE_CONFUSED", False)
    assert attention_in(by_hand, *tensors()) == [TORCHS]


def causal(q, k, v):
    return by_hand(q, k, v, torch.ones(S, S, dtype=torch.bool).tril())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [by_hand, causal])
def test_results_and_gradients(on_gpu, fn, dynamic):
    inputs = tensors()
    assert attention_in(fn, *inputs) == [OURS]
    torch.compiler.reset()
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want, d = fn(*exact), torch.randn(B, H, S, D).bfloat16()
    got = torch.compile(fn, backend="fusion", dynamic=dynamic)(*inputs)
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad(got, inputs, d)
    for mine, its in zip(gradients, torch.autograd.grad(want, exact, d.double()), strict=True):
        torch.testing.assert_close(mine.double(), its, atol=2e-2, rtol=2e-2)


class Seen(TorchDispatchMode):
    """The strides of the first four tensors that calls of attention take."""

    def __init__(self):
        super().__init__()
        self.strides = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.__name__:
            self.strides[func.__name__] = [a.stride() for a in args[:4] if hasattr(a, "stride")]
        return func(*args, **(kwargs or {}))


def seen(call, heads_first, dtype=torch.bfloat16):
    """The strides that the backward of attention sees: of the gradient, q, k and v."""
    q, k, v = tensors(dtype=dtype)
    d = torch.randn(B, H, S, D) if heads_first else torch.randn(B, S, H, D).transpose(1, 2)
    d = d.to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else dtype)
    with torch.autograd.set_multithreading_enabled(False), Seen() as mode:
        out = call(q, k, v, dropout_p=0.0, is_causal=False, scale=D**-0.5)
        torch.autograd.grad(out, (q, k, v), d)
    return next(strides for name, strides in mode.strides.items() if "backward" in name)


def test_no_other_call_has_its_strides_and_its_own_gradients_lie_alike():
    one, other = (seen(own_plan.sdpa_of_own_plan, heads_first) for heads_first in (True, False))
    assert one == other
    plain = [seen(F.scaled_dot_product_attention, heads_first) for heads_first in (True, False)]
    assert plain[0] != plain[1]
    assert one[1:] == [(heads, batch, *rest) for batch, heads, *rest in plain[0][1:]]
    assert all(batch != heads for batch, heads, *_ in one)


def test_in_fp32_the_call_is_the_usual_one_but_under_autocast():
    ours, plain = own_plan.sdpa_of_own_plan, F.scaled_dot_product_attention
    assert seen(ours, True, torch.float32) == seen(plain, True, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert seen(ours, True, torch.float32) == seen(ours, True)


def test_a_call_in_the_code_is_left_alone(on_gpu):
    report = collect(F.scaled_dot_product_attention, *tensors()).report
    (site,) = report.sites
    assert site.reason == "the code calls scaled_dot_product_attention itself"
    assert attention_in(F.scaled_dot_product_attention, *tensors()) == []


def test_more_batches_than_the_kernels_have_heads_stay_batches(monkeypatch):
    monkeypatch.setattr(own_plan, "MOST", B)
    assert seen(own_plan.sdpa_of_own_plan, True) == seen(F.scaled_dot_product_attention, True)
