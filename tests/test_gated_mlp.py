"""The pattern gated_mlp, a feed-forward block with a gate in training: which blocks are found,
values and gradients against fp64, what is kept and when it is refused. tests/test_specialised.py
has the kernel of its backward, which has no interpreter.
"""

import fusion_backend.patterns  # noqa: F401 (the rules by name)
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient
from fusion_backend.ops.operator import call
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject, Unmeasured
from fusion_backend.testing import fused_nodes, rewritten
from tests.kernel_checks import (
    assert_close,
    check_gradient,
    check_value,
    distance,
    exact,
    randn,
    runs_kernels,
)

HALF = [torch.bfloat16, torch.float16]
ACTS = ["silu", "gelu", "gelu_tanh", "relu"]


def weight(k, n, dtype=torch.half):
    return (randn(n, k, dtype=dtype) * k**-0.5).t()


class Block(nn.Module):
    def __init__(self, width=24, inner=48, bias=False, act=F.silu):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias) for _ in range(2))
        self.down, self.act = nn.Linear(inner, width, bias), act

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@runs_kernels
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(act, bias):
    def b(n):
        return randn(n, dtype=torch.half) if bias else None

    x = randn(2, 35, 40, dtype=torch.half)
    args = x, weight(40, 24), b(24), weight(40, 24), b(24), weight(24, 16), b(16), act
    check_value("gated_mlp", *args)
    check_gradient("gated_mlp", *args)
    check_gradient("gated_mlp", *args, needs=["w3"])
    check_gradient("gated_mlp", *args, needs=["x"])
    check_gradient("gated_mlp", *args, needs=["w2", *(["b1"] if bias else [])])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", ACTS)
def test_gradients_of_the_hidden_layer(act, dtype):
    dy, w = randn(70, 40, dtype=dtype), weight(40, 72, dtype)
    gate, up = randn(70, 72, dtype=dtype), randn(70, 72, dtype=dtype)
    for b, b2 in ((None, None), (randn(72, dtype=dtype), randn(72, dtype=dtype))):
        leaves = [
            (exact(t) if v is None else exact(t) + exact(v)).requires_grad_()
            for t, v in ((gate, b), (up, b2))
        ]
        h = activate(leaves[0], act) * leaves[1]
        wants = torch.autograd.grad(h, leaves, exact(dy) @ exact(w))
        found = gated_gradient(dy, w, gate, b, up, b2, act, True)
        for got, want in zip(found, (*wants, h.detach()), strict=True):
            assert_close(got, want, dtype, factor=2)  # dy w is rounded as well
        *both, nothing = gated_gradient(dy, w, gate, b, up, b2, act, False)
        assert nothing is None and all(map(torch.equal, both, found[:2]))


def test_infinite_products_are_masked():
    """In fp16 a product may be infinite; where relu is zero, so is the gradient of its argument."""
    dy, w = torch.full((4, 64), 300.0).half(), torch.full((64, 16), 20.0).half()
    gate, up = -torch.ones(4, 16).half(), torch.ones(4, 16).half()
    d_gate, _, h = gated_gradient(dy, w, gate, None, up, None, "relu", True)
    assert not d_gate.any() and not h.any()


@runs_kernels
def test_gradients_of_gradients():
    x, w, v, u = (weight(8, 8).requires_grad_() for _ in range(4))
    pattern, found = FUSION_RULES["gated_mlp"], []
    for fn in (lambda *a: call(pattern, a), pattern.reference):
        out = fn(x, w, None, v, None, u, None, "silu").float().sin().sum()
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(g.float().square().sum(), (x, w, v, u)))
    for ours, theirs in zip(*found, strict=True):
        assert distance(ours, theirs) < 0.01


@pytest.mark.parametrize("bias", [True, False])
def test_a_block_trains(bias, eager_kernels):
    m, x = Block(bias=bias).bfloat16(), randn(3, 5, 24, dtype=torch.bfloat16)
    compiled = torch.compile(m, backend="fusion", options={"fusion.gate": "always"})
    grads = []
    for call_of in (compiled, m):
        m.zero_grad()
        call_of(x).float().sin().sum().backward()
        grads.append([p.grad for p in m.parameters()])
    assert [site.pattern for site in fusion_backend.report().fused] == ["gated_mlp"]
    for ours, theirs in zip(*grads, strict=True):
        assert distance(ours, theirs) < 0.02
        assert ours.stride() == theirs.stride()


def packed(x, w, _w2, down):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def gate_last(x, w, w2, down):
    return F.linear(F.linear(x, w2) * F.gelu(F.linear(x, w), approximate="tanh"), down)


def by_hand(x, w, w2, down):
    gate = x @ w.t()
    return ((gate * torch.sigmoid(gate)) * (x @ w2.t())) @ down.t()


@pytest.mark.parametrize("written", [packed, gate_last, by_hand])
def test_other_ways_to_write_it(written):
    inner = 96 if written is packed else 48
    shapes = ((5, 24), (inner, 24), (48, 24), (24, 48))
    args = [randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    assert [str(n.target) for n in fused_nodes(rewritten(written, *args))] == [
        "fusion.gated_mlp.default"
    ]


def read_elsewhere(x, w, w2, down):
    h = F.silu(F.linear(x, w)) * F.linear(x, w2)
    return F.linear(h, down), h


def between(x, w, w2, down):
    return F.linear(F.layer_norm(F.silu(F.linear(x, w)) * F.linear(x, w2), (48,)), down)


def of_two_inputs(x, w, w2, down):
    return F.linear(F.silu(F.linear(x, w)) * F.linear(x.flip(0), w2), down)


@pytest.mark.parametrize("written", [read_elsewhere, between, of_two_inputs])
def test_what_is_no_such_block(written):
    shapes = ((5, 24), (48, 24), (48, 24), (24, 48))
    args = [randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    found = [str(n.target) for n in fused_nodes(rewritten(written, *args))]
    assert "fusion.gated_mlp.default" not in found


def test_biases_in_fp32_under_autocast():
    """The hidden layer is fp32 then, and cast for the last product."""

    def block(x, w1, b1, w2, b2, w3):
        with torch.autocast("cpu", torch.bfloat16):
            return (F.silu(F.linear(x, w1) + b1) * (F.linear(x, w2) + b2)) @ w3

    shapes = ((9, 16), (24, 16), (24,), (24, 16), (24,), (24, 8))
    args = [randn(*shape).requires_grad_() for shape in shapes]
    fused = rewritten(block, *args)
    assert [str(n.target) for n in fused_nodes(fused)] == ["fusion.gated_mlp.default"]
    (result,) = fused(*args)
    torch.testing.assert_close(result, block(*args), rtol=0.02, atol=0.02)
    ours = torch.autograd.grad(result.float().sum(), args)
    for got, want in zip(ours, torch.autograd.grad(block(*args).float().sum(), args), strict=True):
        assert got.dtype == torch.float32 and distance(got, want) < 0.02


def test_what_is_refused():
    x, w1, w3 = randn(70, 48, dtype=torch.half), weight(48, 24), weight(24, 16)
    guard = FUSION_RULES["gated_mlp"].guard_fn

    def refusal(x=x, w1=w1, b1=None, w2=w1, b2=None, w3=w3, b3=None):
        return guard(x, w1, b1, w2, b2, w3, b3, "silu")

    assert refusal() is None
    for change, sentence in (
        (dict(x=x.float()), "bf16 and fp16"),
        (dict(w3=w3.float()), "w3 is torch.float32"),
        (dict(w3=randn(24, 20, dtype=torch.half)), "the rows of w3, 20 elements apart"),
        (dict(w2=weight(48, 32)), "the weights have shapes"),
        (dict(b2=randn(16).half()), "b2 with shape (16,)"),
        (dict(b3=randn(24).half()), "b3 with shape (24,)"),
    ):
        answer = refusal(**change)
        assert type(answer) is Reject and sentence in answer.reason, (change, answer)


def test_it_is_for_gpus_with_the_kernel(monkeypatch):
    """Elsewhere gated_linear has the same kernels."""
    worthwhile = FUSION_RULES["gated_mlp"].worthwhile_fn
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")
    w, w3 = x.new_empty(4096, 1024).t(), x.new_empty(1024, 4096).t()
    for device, rows, takes in (("meta", 8192, True), ("meta", 512, False), ("cpu", 8192, False)):
        like = torch.empty(1, 1024, dtype=torch.bfloat16, device=device).expand(rows, 1024)
        monkeypatch.setattr(
            "fusion_backend.kernels.gemm.specialised.interpreted", lambda kernel: False
        )
        answer = worthwhile(like, w, None, w, None, w3, None, "silu", True)
        assert type(answer) is (Unmeasured if takes else Reject), (device, rows, answer)
