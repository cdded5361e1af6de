"""The gradient at zero: relu and hardtanh have none there, maximum halves it, and clamp passes it
on in some releases of torch. All results of a layer whose weights begin as zeros are zero.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend import Pattern
from fusion_backend.ops.registry import unregister
from fusion_backend.testing import assert_fuses, collect, fused_nodes, rewritten, with_kernels
from tests.kernel_checks import randn

ACTS = {
    "relu": F.relu,
    "clamp": lambda y: y.clamp(min=0),
    "clamp_min": lambda y: torch.clamp_min(y, 0.0),
    "maximum": lambda y: torch.maximum(y, torch.zeros_like(y)),
}


def is_relu(act) -> bool:
    """Has it no gradient at zero?"""
    zero = torch.zeros(1, requires_grad=True)
    return not torch.autograd.grad(act(zero).sum(), zero)[0].any()


@pytest.mark.parametrize("act", ACTS)
def test_of_a_linear_layer(act):
    """In training only what has no gradient at zero is relu, in inference all are."""
    x, w, b = torch.randn(8, 64), torch.zeros(64, 64), torch.zeros(64)

    def model(x, w, b):
        return ACTS[act](F.linear(x, w, b))

    assert_fuses(model, x, w, b, pattern="linear_act", count=1)
    w, b = w.requires_grad_(), b.requires_grad_()
    assert_fuses(model, x, w, b, pattern="linear_act", count=int(is_relu(ACTS[act])))
    compiled = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    got, want = (torch.autograd.grad(f(x, w, b).sum(), [w, b]) for f in (compiled, model))
    torch.testing.assert_close(got, want)
    assert all(g.any() != is_relu(ACTS[act]) for g in want)


@pytest.mark.parametrize("act", ACTS)
def test_of_a_norm(act):
    x, w, b = torch.randn(8, 64), torch.zeros(64), torch.zeros(64)

    def model(x, w, b):
        return ACTS[act](F.layer_norm(x, (64,), w, b))

    assert_fuses(model, x, w, b, pattern="norm_act", count=1)
    w, b = w.requires_grad_(), b.requires_grad_()
    assert_fuses(model, x, w, b, pattern="norm_act", count=int(is_relu(ACTS[act])))


def hardtanh(y):
    return F.hardtanh(y, 0.0, 6.0)


def clamp(y):
    return y.clamp(0, 6)


def relu_and_bound(y):
    return F.relu(y).clamp(max=6)


@pytest.mark.parametrize(
    "act, word",
    [
        (F.relu6, "relu6"),
        (hardtanh, "relu6"),
        (lambda y: F.hardtanh(y, 0.0, 5.0), "identity"),
        (clamp, "identity"),
        (relu_and_bound, "relu"),
    ],
)
def test_with_a_second_bound(act, word):
    """Only what has no gradient at its bounds is relu6."""
    word = "relu6" if act in (clamp, relu_and_bound) and is_relu(clamp) else word

    def model(x, w, b, mean, var):
        return act(F.batch_norm(x, mean, var, w, b, True))

    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    w, b = (torch.zeros(8, requires_grad=True) for _ in range(2))
    (call,) = fused_nodes(collect(model, x, w, b, torch.zeros(8), torch.ones(8)).graphs[0])
    assert str(call.target) == "fusion.batch_norm_training.default" and call.args[-1] == word


def test_of_a_pattern_with_clamp():
    """A pattern finds its own reference, in training and in inference, and no relu in training."""

    @Pattern
    def bounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.tanh((x * torch.sigmoid(w)).clamp(min=0)))

    def relu(x, w):
        return torch.exp(torch.tanh(F.relu(x * torch.sigmoid(w))))

    try:
        x, w = torch.randn(8, 64), torch.randn(64)
        for trains in (False, True):
            x.requires_grad_(trains)
            assert_fuses(lambda x, w: bounded(x, w), x, w, pattern="bounded", count=1)
            alike = not trains or is_relu(ACTS["clamp"])
            assert_fuses(relu, x, w, pattern="bounded", count=int(alike))
        sites = [s for s in collect(relu, x, w).report.sites if s.pattern == "bounded"]
        assert alike or "passes no gradient, unlike" in sites[0].reason
    finally:
        unregister("bounded")


N = 32
WITH_NAN = {
    "linear_act": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "norm_act": lambda x, w, b: F.relu(F.layer_norm(x, (N,), w[0], b)),
    "mlp": lambda x, w, b: F.relu(F.linear(x, w, b)) @ w,
    "gated_linear": lambda x, w, b: F.relu(F.linear(x, w, b)) * (x @ w),
}


@pytest.mark.parametrize("name", WITH_NAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_passes_the_gradient_of_relu_on(name, dtype):
    """As it does in eager code: a gradient that is NaN is not to become 0."""
    x, w, b = randn(8, N, dtype=dtype), randn(N, N, dtype=dtype), randn(N, dtype=dtype)
    x[0] = torch.nan
    leaves, fn = [t.requires_grad_() for t in (x, w, b)], WITH_NAN[name]
    want = torch.autograd.grad(fn(*leaves).sum(), leaves)
    graph = rewritten(fn, *leaves)
    order = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    (site,) = fused_nodes(graph)
    named = dict(zip(("l_x_", "l_w_", "l_b_"), leaves, strict=True))
    (y, *_) = with_kernels(graph)(*(named[n] for n in order))
    got = torch.autograd.grad(y.sum(), leaves)
    assert name in str(site.target)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, equal_nan=True)
