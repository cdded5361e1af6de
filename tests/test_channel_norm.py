"""What channel_norm is found in, what it leaves alone, and whole functions that it stands in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend import explain
from fusion_backend.testing import assert_fuses, collect, value_and_gradients
from tests.kernel_checks import Kernels, check_training, runs_kernels
from tests.measured_cases import Answers, as_on_a_gpu, decided

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "channel_norm"


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
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
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
    check_training(NAME, layers, torch.randn(2, 3, 7, 7), autocast)


CONV = nn.Conv2d(96, 96, 3, padding=1)
NORM = LayerNorm2d(96)


@pytest.mark.parametrize(
    ("fn", "taken"),
    [
        (lambda x: CONV(NORM(x)), False),
        (lambda x: NORM(CONV(x)), False),
        (lambda x: CONV(NORM(x).sin() + x), False),
        (lambda x: (NORM(x.sin()), CONV(x)), True),
    ],
    ids=["before", "behind", "further before", "apart"],
)
def test_images_that_inductor_lays_out_for_a_convolution(monkeypatch, tmp_path, fn, taken):
    """Whatever was measured in a region with the layout of the graph."""
    x = torch.randn(32, 96, 64, 64, requires_grad=True)
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(channel_norm=2.0)):
        record = decided(fn, x)
    (site,) = (s for s in record.sites if s.pattern == NAME and s.counted)
    assert site.fused is taken, site
    assert ("Inductor computes conv2d channels-last" in site.reason) is not taken, site
