"""channel_norm: its kernels against fp64, what it is found in, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend import explain
from fusion_backend.frontends.explain import Collector
from fusion_backend.kernels.norm import channel_norm as kernels
from fusion_backend.kernels.norm import channel_norm_backward as gradients
from fusion_backend.kernels.norm.channel_norm import ChannelNorm, Tile
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.testing import assert_fuses, collect, value_and_gradients, with_kernels
from tests.kernel_checks import (
    FLOATS,
    check,
    distance,
    randn,
    runs_kernels,
    symbolic,
)
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "channel_norm"
PATTERN = FUSION_RULES[NAME]
NORMS = ["layer", "rms", "length"]
SCALE = dict(layer=None, rms=None, length=3.5)
# one position; one channel; three dimensions and five; 1000 channels; planes that end within a tile
SHAPES = [(1, 96, 1), (3, 1, 5, 5), (2, 3, 2049), (3, 96, 7, 7), (2, 1000, 3, 3), (2, 6, 3, 4, 5)]


def vectors(x, dtype=None):
    shape = (x.shape[1], *(1,) * (x.dim() - 2))
    return [randn(*shape, dtype=dtype or x.dtype) for _ in "wb"]


# The kernels


@runs_kernels
@product(shape=SHAPES, norm=NORMS, dtype=FLOATS)
def test_shapes_and_dtypes(shape, norm, dtype):
    x = randn(*shape, dtype=dtype)
    # the gradient of one channel is what eps makes of it; versions of torch differ where x is eps
    eps = 1.01 if shape[1] == 1 else 1e-3
    check(NAME, x, SCALE[norm], *vectors(x), eps, norm)


@runs_kernels
@product(affine=[(0, 0), (1, 0), (0, 1), (1, 1)], norm=NORMS, leading=[False, True])
def test_with_and_without_weight_and_bias(affine, norm, leading):
    x = randn(2, 20, 3, 5)
    args = [
        (v[None] if leading else v) if there else None
        for v, there in zip(vectors(x), affine, strict=True)
    ]
    check(NAME, x, SCALE[norm], *args, 1e-5, norm)


@runs_kernels
@pytest.mark.parametrize("needs", ["x", "weight", "bias", "x weight", "weight bias"])
def test_only_wanted_gradients_are_computed(needs):
    x = randn(2, 20, 3, 5)
    check(NAME, x, None, *vectors(x), 1e-5, "layer", needs=needs.split())


@runs_kernels
def test_a_frozen_norm_has_no_sums(monkeypatch):
    launched, own = [], gradients.launch
    monkeypatch.setattr(
        gradients,
        "launch",
        lambda kernel, *a, **k: (launched.append((kernel, k)), own(kernel, *a, **k)),
    )
    x = randn(2, 20, 3, 5)
    check(NAME, x, None, *vectors(x), 1e-5, "layer", needs=["x"])
    ((kernel, options),) = launched
    assert kernel is gradients.channel_norm_backward_kernel
    assert not options["WEIGHT"] and not options["BIAS"]


@runs_kernels
@product(samples=[1, 7], planes=[(4, 4), (3, 7)], norm=NORMS)
def test_programs_that_walk_through_tiles(samples, planes, norm, monkeypatch):
    """A tile lies in one sample, begins in one and ends in another, or spans several."""
    how = Tile(32, 16, 1, 1, 2)
    monkeypatch.setattr(kernels, "forward_tile", lambda c: how)
    monkeypatch.setattr(gradients, "backward_tile", lambda c: how)
    x = randn(samples, 20, *planes)
    check(NAME, x, SCALE[norm], *vectors(x), 1e-5, norm)


@runs_kernels
@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (2, 6, 0, 4)])
def test_no_positions(shape):
    x = randn(*shape)
    weight, bias = vectors(x)
    y = PATTERN.kernel_fn(x, None, weight, bias, 1e-5, "layer")
    assert y.shape == x.shape
    norm = ChannelNorm(weight, bias, 1e-5, "layer")
    dx, *sums = gradients.backward(y, x, norm, (True, True, True))
    assert dx.shape == x.shape
    assert all(d.shape == weight.shape and not d.any() for d in sums)


@runs_kernels
@pytest.mark.parametrize("order", ["expanded", "channels-last"])
def test_a_gradient_of_any_strides(order):
    x = randn(2, 20, 3, 5)
    weight, _ = vectors(x)
    last = randn(2, 3, 5, 20).permute(0, 3, 1, 2)
    dy = randn(1, 1, 1, 1).expand(x.shape) if order == "expanded" else last
    leaf = x.double().requires_grad_()
    want = PATTERN.reference(leaf, None, weight.double(), None, 1e-5, "layer")
    (want,) = torch.autograd.grad(want, leaf, dy.double())
    dx, _, _ = gradients.backward(
        dy, x, ChannelNorm(weight, None, 1e-5, "layer"), (True, False, False)
    )
    assert distance(dx, want) < 1e-5 and dx.is_contiguous()


@runs_kernels
def test_far_from_zero():
    x = randn(2, 1000, 3, 3) + 1000
    got = PATTERN.kernel_fn(x, None, None, None, 1e-5, "layer")
    # the interpreter adds up one by one
    assert distance(got, PATTERN.reference(x.double(), None, None, None, 1e-5, "layer")) < 1e-3


@runs_kernels
@pytest.mark.parametrize("norm", NORMS)
def test_without_eps_padding_stays_out_of_the_sums(norm):
    """Beyond the last position there is nothing but zeros, whose rstd is infinite."""
    x = randn(1, 20, 3, 3)
    check(NAME, x, SCALE[norm], *vectors(x), 0.0, norm)


@runs_kernels
@pytest.mark.parametrize("scale", [None, 3.5, -2.0, 0.0])
def test_positions_shorter_than_eps(scale):
    """Their length does not count, and has no gradient."""
    x = randn(2, 6, 3, 5)
    x[:, :, 1] *= 1e-3
    x[0, :, 2, 2] = 0
    check(NAME, x, scale, *vectors(x), 0.1, "length")


@runs_kernels
@pytest.mark.parametrize("norm", NORMS)
def test_nan_and_infinity_stay_at_their_positions(norm):
    x = randn(2, 6, 3, 5)
    x[0, 3, 1, 1], x[1, 5, 2, 2] = float("nan"), float("inf")
    args = None, None, None, 1e-5, norm
    y, want = PATTERN.kernel_fn(x, *args), PATTERN.reference(x, *args)
    assert torch.equal(y.isnan(), want.isnan()) and y[0, :, 1, 1].isnan().all()
    assert y.isnan().any(1).sum() == 2


@runs_kernels
def test_gradients_repeat():
    x, dy = randn(5, 20, 7, 7), randn(5, 20, 7, 7)
    norm = ChannelNorm(*vectors(x), 1e-5, "layer")
    first, second = (gradients.backward(dy, x, norm, (True, True, True)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@runs_kernels
@product(dtype=FLOATS, norm=NORMS)
def test_no_further_from_fp64_than_the_unfused_code(dtype, norm):
    x = randn(2, 96, 5, 5, dtype=dtype)
    args = SCALE[norm], *vectors(x), 1e-6, norm
    exact = PATTERN.reference(
        *(a.double() if isinstance(a, torch.Tensor) else a for a in (x, *args))
    )
    got, eager = PATTERN.kernel_fn(x, *args), PATTERN.reference(x, *args)
    # the interpreter adds up one by one, and rounds to bf16 by cutting off
    assert distance(got, exact) <= 2 * distance(eager, exact)


# The guard


def test_refusals():
    x, refused = randn(2, 6, 4, 4), PATTERN.guard_fn
    w, b = vectors(x)
    for args, sentence in [
        ((x.half(), w, None), "x is torch.float16 and weight is torch.float32"),
        ((x.double(), None, None), "x is torch.float64"),
        ((x.to(memory_format=torch.channels_last), w, b), "x is channels-last in memory"),
        ((x[..., ::2], w, b), "x is not dense"),
        ((randn(2, 8, 4, 4)[:, :6], w, b), "x is not dense"),
        ((x[:1].expand(2, 6, 4, 4), w, b), "x is not dense"),
        ((x, randn(1, 1, 4), None), "is not one number for each of the 6 channels"),
        ((x, w[:1], None), "is not one number for each of the 6 channels"),
        ((x, None, randn(6)), "is not one number for each of the 6 channels"),
        ((x, randn(2, 6, 1, 1), None), "is not one number for each of the 6 channels"),
        ((x, randn(12, 1, 1)[::2], None), "weight is not dense"),
        ((randn(1, 1025, 2, 2), None, None), "1025 channels are not between 1 and 1024"),
        ((randn(2, 6), None, None), "x has 2 dimensions"),
        ((torch.empty(1, 65, 4096, 4096, device="meta"), None, None), "is larger than 1073741824"),
    ]:
        answer = refused(args[0], None, *args[1:], 1e-5, "layer")
        assert answer is not None and sentence in answer.reason, (sentence, answer)
    for weight in (None, w, w[None]):
        assert refused(x, None, weight, b, 1e-5, "layer") is None
    answer = PATTERN.worthwhile_fn(x, None, None, None, 1e-5, "layer", False)
    assert isinstance(answer, Unmeasured)


def test_symbolic_sizes():
    env, (x,) = symbolic(torch.randn(3, 5))
    samples, planes = x.new_empty(x.shape[0], 6, 4, 4), x.new_empty(3, 6, x.shape[1], 4)
    guards = len(env.guards)
    assert PATTERN.guard_fn(samples, None, None, None, 1e-5, "layer") is None
    assert "dynamic" in PATTERN.guard_fn(planes, None, None, None, 1e-5, "layer").reason
    eps = x.shape[0] * 1.0
    assert "dynamic" in PATTERN.guard_fn(samples, None, None, None, eps, "layer").reason
    assert "dynamic" in PATTERN.guard_fn(samples, eps, None, None, 1e-5, "length").reason
    assert len(env.guards) == guards


class Kernels(Collector):
    """Compiles a graph into the rewritten one, with kernels at its sites, run eagerly."""

    def __init__(self):
        super().__init__({"fusion.gate": "always", "fusion.only": NAME})

    def __call__(self, gm, example_inputs):
        super().__call__(gm, example_inputs)
        return with_kernels(self.graphs[-1]).forward


# What is found


class LayerNorm2d(nn.Module):
    """As in Segment Anything and, channels-first, in ConvNeXt."""

    def __init__(self, c, eps=1e-6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(c)), nn.Parameter(torch.randn(c))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def by_variance(x, w, b):
    var = torch.var(x, dim=1, unbiased=False, keepdim=True)
    mean = torch.mean(x, dim=1, keepdim=True)
    return (x - mean) * (var + 1e-5).rsqrt() * w.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)


def by_var_mean(x, w, b):
    var, mean = torch.var_mean(x, dim=(1,), correction=0, keepdim=True)
    return (x - mean).div((var + 1e-5) ** 0.5).mul(w.reshape(-1, 1, 1)).add(b[None, :, None, None])


def kept_by_hand(x, w, b):
    u = x.mean(1).unsqueeze(1)
    s = ((x - u) ** 2).sum(1)[:, None] / x.shape[1]
    return (x - u) / (s + 1e-5).sqrt() * w[..., None, None] + b.unsqueeze(-1).unsqueeze(-1)


def in_fp32(x, w, b):
    y = x.float()
    u = y.mean(1, keepdim=True)
    y = (y - u) / torch.sqrt((y - u).square().mean(1, keepdim=True) + 1e-6)
    return y.to(x.dtype) * w[:, None, None] + b[:, None, None]


def bias_alone(x, w, b):
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() + (w * b)[:, None, None]


def rms(x, w, b):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w[:, None, None]


def rms_in_fp32(x, w, b):
    y = x.float()
    y = (y * torch.rsqrt((y * y).mean(dim=1, keepdim=True) + 1e-6)).to(x.dtype)
    return w.view(-1, 1, 1) * y + b.view(-1, 1, 1)


def rms_by_root(x, w, b):
    return w[:, None, None] * (x / (x**2).mean(1, keepdim=True).add(1e-8).sqrt())


def unit(x, w, b):
    return F.normalize(x, dim=1)


def of_wan(x, w, b):
    """The RMS norm of Wan's VAE."""
    return F.normalize(x, dim=1) * 6**0.5 * w[:, None, None] + b[:, None, None]


def of_lucidrains(x, w, b):
    return F.normalize(x, dim=1) * w.view(1, -1, 1, 1) * 6**0.5


def unit_by_hand(x, w, b):
    length = x.square().sum(1, keepdim=True).sqrt()
    return x / length.clamp(min=1e-6) * (w + 1)[:, None, None]


def unit_by_root(x, w, b):
    return x * torch.rsqrt((x * x).sum(1, keepdim=True).clamp_min(1e-4)) * b[:, None, None]


BY_HAND = [
    unit, of_wan, of_lucidrains, unit_by_hand, unit_by_root,
    by_variance, by_var_mean, kept_by_hand, in_fp32, bias_alone, rms, rms_in_fp32, rms_by_root,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", BY_HAND)
def test_spellings(fn, dtype):
    inputs = (torch.randn(s, dtype=dtype) for s in ((2, 6, 4, 5), 6, 6))
    report = assert_fuses(fn, *inputs, pattern=NAME)
    assert [s.pattern for s in report.fused] == [NAME]


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 3, 4), (2, 6, 2, 3, 4), (1, 6, 3, 4)])
def test_any_number_of_dimensions(shape):
    def norm(x, w):
        u = x - x.mean(1, keepdim=True)
        return u / torch.sqrt((u * u).mean(1, keepdim=True) + 1e-5) * w

    ones = (1,) * (len(shape) - 2)
    for parameter in ((6, *ones), (1, 6, *ones)):
        assert_fuses(norm, torch.randn(shape), torch.randn(parameter), pattern=NAME)


def test_modules():
    x = torch.randn(2, 6, 4, 4)
    assert_fuses(LayerNorm2d(6), x, pattern=NAME)
    assert_fuses(nn.Sequential(nn.Conv2d(6, 6, 3), LayerNorm2d(6), nn.GELU()), x, pattern=NAME)


def test_in_a_checkpoint_and_in_place():
    norm = LayerNorm2d(6)

    def in_a_checkpoint(x):
        return torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sin()

    def in_place(x):
        u = x - x.mean(1, keepdim=True)
        return u.div_((u.square().mean(1, keepdim=True) + 1e-5).sqrt_())

    for fn in (in_a_checkpoint, in_place):
        assert_fuses(fn, torch.randn(2, 6, 4, 4, requires_grad=fn is not in_place), pattern=NAME)


def test_two_norms_of_one_value():
    first, second = LayerNorm2d(6), LayerNorm2d(6)
    report = collect(
        lambda x: first(x).sin() + second(x.cos()),
        torch.randn(2, 6, 4, 4),
        dynamic=False,
        options={"fusion.only": NAME},
    ).report
    assert len(report.fused) == 2, report


def spread(x, dim=1, **how):
    return (x.var(dim, keepdim=True, **how) + 1e-5).sqrt()


def norm(x):
    return (x - x.mean(1, keepdim=True)) / spread(x, correction=0)


# of x [3, 4, 4, 4], where every wrong dimension has the right size
NEAR_MISSES = {
    "the unbiased variance": lambda x: (x - x.mean(1, keepdim=True)) / spread(x),
    "over another dimension": lambda x: (x - x.mean(2, keepdim=True)) / spread(x, 2, correction=0),
    "over the last dimension": lambda x: (
        (x - x.mean(-1, keepdim=True)) / spread(x, -1, correction=0)
    ),
    "over the samples": lambda x: (x - x.mean(0, keepdim=True)) / spread(x, 0, correction=0),
    "over two dimensions": lambda x: (
        (x - x.mean((1, 2), keepdim=True)) / spread(x, (1, 2), correction=0)
    ),
    "the mean of another dimension": lambda x: (
        (x - x.mean(2, keepdim=True)) / spread(x, correction=0)
    ),
    "a mean that lost its dimension": lambda x: (x - x[:1].mean(1)) / spread(x, correction=0),
    "a variance that lost its dimension": lambda x: (
        (x - x.mean(1, keepdim=True)) / (x[:1].var(1, correction=0) + 1e-5).sqrt()
    ),
    "the variance of another value": lambda x: (
        (x - x.mean(1, keepdim=True)) / spread(x.sin(), correction=0)
    ),
    "the mean added": lambda x: (x + x.mean(1, keepdim=True)) / spread(x, correction=0),
    "eps outside the root": lambda x: (
        (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True).sqrt() + 1e-5)
    ),
    "multiplied by the root": lambda x: (x - x.mean(1, keepdim=True)) * spread(x, correction=0),
    "the mean is used elsewhere": lambda x: (
        lambda u: ((x - u) / spread(x, correction=0), u.sin())
    )(x.mean(1, keepdim=True)),
    "what is centred is used elsewhere": lambda x: (
        lambda u: (u / (u.square().mean(1, keepdim=True) + 1e-5).sqrt(), u.sin())
    )(x - x.mean(1, keepdim=True)),
    "the length of another order": lambda x: x / x.norm(1, dim=1, keepdim=True).clamp_min(1e-5),
    "the length over another dimension": lambda x: F.normalize(x, dim=2),
    "the length over rows": lambda x: F.normalize(x, dim=-1),
    "the length over everything": lambda x: F.normalize(x, dim=(1, 2)),
    "the square of the length": lambda x: x / x.square().sum(1, keepdim=True).clamp_min(1e-5),
    "the mean of squares, not their sum": lambda x: (
        x / x.square().mean(1, keepdim=True).sqrt().clamp_min(1e-5)
    ),
    "no mean at all": lambda x: x * torch.rsqrt(x * x + 1e-5),
    "the sum of squares, not their mean": lambda x: (
        x * torch.rsqrt((x * x).sum(1, keepdim=True) + 1e-5)
    ),
    "an upper bound of the length": lambda x: x / x.norm(dim=1, keepdim=True).clamp_max(1e-5),
    "the length and eps added": lambda x: x / (x.norm(dim=1, keepdim=True) + 1e-5),
    "the length of another value": lambda x: x / x.sin().norm(dim=1, keepdim=True).clamp_min(1e-5),
    "written over between its reads": lambda x: (
        lambda x, u: (x.add_(1) - u) / spread(x, correction=0)
    )(x.sin(), x.sin().mean(1, keepdim=True)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert_fuses(NEAR_MISSES[name], torch.randn(3, 4, 4, 4), pattern=NAME, count=0)


# what is left outside the site, as written behind norm(x); [4] is over the last dimension
AFTER = {
    "a weight over positions": ("weight", lambda y, v: y * v),
    "a weight over rows": ("weight", lambda y, v: y * v[:, None]),
    "a weight of each sample": ("weight", lambda y, v: y * v[:3, None, None, None]),
    "a weight of everything": ("weight", lambda y, v: y * v.sum()),
    "a bias over positions": ("bias", lambda y, v: y + v),
    "a weight behind the bias": ("weight", lambda y, v: (y + v[:, None, None]) * v[:, None, None]),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_is_no_weight_or_bias_stays_outside(name):
    argument, fn = AFTER[name]
    x, v = torch.randn(3, 4, 4, 4), torch.randn(4)
    graph = collect(lambda x, v: fn(norm(x), v), x, v, dynamic=False, options={"fusion.only": NAME})
    (site,) = graph.report.fused
    (node,) = [n for g in graph.graphs for n in g.graph.nodes if "channel_norm" in str(n.target)]
    schema = [a.name for a in node.target._schema.arguments]
    assert node.args[schema.index(argument)] is None, node.format_node()
    assert_fuses(lambda x, v: fn(norm(x), v), x, v, pattern=NAME)


# How it lies in memory


def permuted(x, w, b):
    """As timm and torchvision write LayerNorm2d."""
    return F.layer_norm(x.permute(0, 2, 3, 1), (6,), w, b, 1e-6).permute(0, 3, 1, 2)


@pytest.mark.parametrize("last", [False, True])
def test_rows_of_a_permuted_tensor_are_left_as_they_were(last):
    """The result lies channels-last in memory: it is layer_norm's, or Inductor's."""
    x, w, b = torch.randn(2, 6, 4, 4), torch.randn(6), torch.randn(6)
    x = x.to(memory_format=torch.channels_last) if last else x
    report = explain(permuted, x, w, b, target="H200", options={"fusion.gate": "always"})
    assert [s.pattern for s in report.fused] == ["layer_norm"] * last, report
    assert not [s for s in report.sites if s.pattern == NAME]


def test_channels_last_is_declined_with_a_sentence():
    x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
    report = explain(LayerNorm2d(6), x, target="H200", options={"fusion.gate": "always"})
    reasons = {s.reason for s in report.sites if s.pattern == NAME}
    assert not report.fused and any("x is channels-last" in reason for reason in reasons), report


@pytest.mark.parametrize("training", [False, True])
def test_the_tables_do_not_take_it(training):
    """It is the gate's measurement that takes it."""
    x = torch.randn(8, 96, 56, 56, requires_grad=training)
    tables, always = (
        explain(LayerNorm2d(96), x, target="H200", options={"fusion.gate": gate})
        for gate in ("table", "always")
    )
    assert [s.pattern for s in always.fused] == [NAME]
    assert NAME not in [s.pattern for s in tables.fused]
    reasons = [s.reason for s in tables.sites if s.pattern == NAME]
    assert any("has not been timed" in reason for reason in reasons), reasons


# Whole functions


@runs_kernels
def test_a_dynamic_batch():
    collector = Kernels()
    compiled = torch.compile(by_variance, backend=collector, dynamic=None)
    for samples in (3, 5):
        inputs = [torch.randn(samples, 6, 3, 4), torch.randn(6), torch.randn(6)]
        torch._dynamo.mark_dynamic(inputs[0], 0)
        [t.requires_grad_() for t in inputs]
        got, want = (value_and_gradients(fn, inputs) for fn in (compiled, by_variance))
        torch.testing.assert_close(got, want)
    (graph,) = collector.report.graphs  # compiled once
    assert len(collector.report.fused) == 1, collector.report


@runs_kernels
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_train_as_in_fp64(autocast):
    """Convolution, norm, gelu, convolution, in the precision of eager."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Conv2d(3, 12, 3), LayerNorm2d(12), nn.GELU(), nn.Conv2d(12, 4, 1))
    collector, x = Kernels(), torch.randn(2, 3, 7, 7)

    def gradients_of(run, x):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            loss = run(x).float().square().mean()
        return torch.autograd.grad(loss, list(layers.parameters()))

    got = gradients_of(torch.compile(layers, backend=collector, dynamic=False), x)
    eager = gradients_of(layers, x)
    layers.double()
    want = torch.autograd.grad(layers(x.double()).square().mean(), list(layers.parameters()))
    assert [s.pattern for s in collector.report.fused] == [NAME]
    for mine, its, exact in zip(got, eager, want, strict=True):
        assert distance(mine, exact) <= 1.5 * distance(its, exact) + 1e-6
