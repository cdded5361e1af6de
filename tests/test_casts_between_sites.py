"""Sites with casts between them: the narrow value is what one writes and the next one reads."""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.frontends.explain import Collector

BF16 = torch.bfloat16


def norm(x):
    return F.layer_norm(x, (16,))


def rms(x):
    return F.rms_norm(x, (16,))


def in_fp32(function, x):
    return function(x.float()).to(x.dtype)


def softmax(x):
    return torch.softmax(x, -1)


# of fp32 values
ROUNDED = {
    "rounded in between": (lambda x: rms(norm(x).to(BF16)), 2),
    "rounded and back": (lambda x: rms(norm(x).to(BF16).float()), 2),
    "rounded twice": (lambda x: rms(norm(x).to(BF16).float().to(BF16).float()), 2),
    "rounded around the first": (lambda x: rms(norm(x.to(BF16)).float()), 2),
    "rounded around both": (lambda x: rms(norm(x.to(BF16)).float()).to(BF16), 2),
    "three": (lambda x: norm(rms(norm(x.to(BF16)).float()).to(BF16).float()), 3),
    "read at two roundings": (lambda x: [softmax(y := norm(x).to(BF16).float()), y, F.gelu(y)], 3),
}
# of bf16 values
UPCAST = {
    "softmax of softmax": (lambda x: in_fp32(softmax, in_fp32(softmax, x)), 2),
    "softmax of a norm": (lambda x: in_fp32(softmax, y := in_fp32(norm, x)) + y, 2),
    "norm of a norm": (lambda x: in_fp32(norm, in_fp32(norm, x)), 2),
}
CASES = [(name, torch.float32, *case) for name, case in ROUNDED.items()]
CASES += [(name, BF16, *case) for name, case in UPCAST.items()]


@pytest.mark.parametrize(
    ("dtype", "fn", "sites"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_each_is_fused_and_computed_once(dtype, fn, sites):
    torch._dynamo.reset()
    backend = Collector({"fusion.gate": "always"})
    x = torch.randn(8, 16).to(dtype)
    got, want = torch.compile(fn, backend=backend)(x), fn(x)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    counted = [s for s in backend.report.sites if s.counted]
    assert len(backend.report.fused) == len(counted) == sites
    (graph,) = backend.graphs
    calls = [n for n in graph.graph.nodes if "fusion" in str(n.target)]
    assert len(calls) == sites and all(n.users for n in calls)
    left = {"softmax", "layer_norm", "rms_norm", "gelu"}
    assert left.isdisjoint(getattr(n.target, "__name__", "") for n in graph.graph.nodes)


@pytest.mark.parametrize("fn", [c[2] for c in CASES[-3:]], ids=[c[0] for c in CASES[-3:]])
def test_arguments_and_results_stay_narrow(fn):
    backend = Collector({"fusion.gate": "always"})
    torch.compile(fn, backend=backend)(torch.randn(8, 16).to(BF16))
    (graph,) = backend.graphs
    assert not any(n.target == "float" for n in graph.graph.nodes)


def test_an_argument_that_another_site_computes_inside():
    """The second norm would write fp32 of a narrow argument, and the first has no wide result."""

    def fn(x):
        return rms(in_fp32(norm, x).float())

    backend = Collector({"fusion.gate": "always"})
    x = torch.randn(8, 16).to(BF16)
    torch.testing.assert_close(torch.compile(fn, backend=backend)(x), fn(x), rtol=3e-2, atol=3e-2)
    assert [s.pattern for s in backend.report.fused] == ["layer_norm"]
    (refused,) = [s for s in backend.report.sites if s.counted and not s.fused]
    line = norm.__code__.co_firstlineno + 1
    told = f"its argument, the result of layer_norm at {__file__}:{line}, is inside layer_norm"
    assert refused.reason == told


def test_a_value_inside_that_a_larger_site_reads():
    """The larger one is taken first, and reads the product of the norm before its cast."""

    def fn(x):
        y = rms(in_fp32(norm, x).float())
        scale = y.abs().amax(-1, keepdim=True) / 127
        return torch.clamp(torch.round(y / scale), -127, 127).to(torch.int8), scale

    backend = Collector({"fusion.gate": "always"})
    torch.compile(fn, backend=backend)(torch.randn(8, 16).to(BF16))
    assert "rms_norm_quantize" in [s.pattern for s in backend.report.fused]
    line = norm.__code__.co_firstlineno + 1
    told = f"the result of layer_norm inside it, at {__file__}:{line}, is read by rms_norm_quantize"
    assert told in [s.reason for s in backend.report.sites if s.pattern == "layer_norm"]


def test_a_residual_sum_between_two_norms_of_gemma():
    """The first norm is cast back to bf16; the sum reads it there, and not its fp32 product."""

    def gemma(x, weight):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + weight.float())).type_as(x)

    def fn(x, residual, weight, w):
        h = residual + gemma(x @ w, weight)
        return gemma(h, weight) @ w, h

    backend = Collector({"fusion.gate": "always"})
    inputs = [torch.randn(*s).to(BF16) for s in ((8, 16), (8, 16), (16,), (16, 16))]
    got, want = torch.compile(fn, backend=backend)(*inputs), fn(*inputs)
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
    assert sorted(s.pattern for s in backend.report.fused) == ["add_rms_norm", "rms_norm"]


def half_is_read_outside(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b, norm(a)


def transposed_key_is_read_outside(h):
    key = h.sin().transpose(-2, -1)
    return softmax(h @ key * 0.25) @ h.cos(), softmax(key)


@pytest.mark.parametrize(
    ("fn", "patterns"),
    [
        (half_is_read_outside, ["gated_act", "layer_norm"]),
        (transposed_key_is_read_outside, ["attention", "softmax"]),
    ],
)
def test_views_of_an_argument_may_be_read_by_others(fn, patterns):
    backend = Collector({"fusion.gate": "always"})
    x = torch.randn(1, 2, 8, 32)
    torch.testing.assert_close(torch.compile(fn, backend=backend)(x), fn(x))
    assert sorted(s.pattern for s in backend.report.fused) == patterns


@pytest.mark.parametrize("kind", [lambda v, z: v * 2, lambda v, z: v.type_as(z) * 2])
def test_a_cast_inside_that_is_read_outside(kind):
    def fn(x, w, b, z):
        v = F.linear(x, w, b).float()
        return F.gelu(v).to(BF16), kind(v, z)

    backend = Collector({"fusion.gate": "always"})
    inputs = [torch.randn(*s).to(BF16) for s in ((8, 16), (16, 16), (16,))]
    torch.compile(fn, backend=backend)(*inputs, torch.randn(8, 16))
    assert "linear_act" not in {s.pattern for s in backend.report.fused}
