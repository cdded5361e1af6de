"""Convolutions whose windows lie side by side: what they are taken for, that it is the same, and
what is left alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusion_backend
from fusion_backend.testing import assert_fuses, collect

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Embedding(nn.Module):
    """As models of images have it: flattened, windows before channels, and a position added."""

    def __init__(self, kernel, rank: int = 2, channels: int = 3, **options):
        super().__init__()
        self.projection = CONVOLUTIONS[rank](channels, 10, kernel, **dict(stride=kernel) | options)
        self.position = nn.Parameter(torch.randn(10))

    def forward(self, x):
        return self.projection(x).flatten(2).transpose(1, 2) + self.position


def step(fn, model, x, dy) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_(x.requires_grad)
    y = fn(leaf)
    y.backward(dy)
    return [
        y.detach(),
        *(p.grad for p in model.parameters()),
        *([leaf.grad] if leaf.requires_grad else []),
    ]


def strides(t: torch.Tensor) -> list[int]:
    """Those that count."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


KINDS = {
    "square": (dict(kernel=4), (2, 3, 12, 12)),
    "a rest at both edges": (dict(kernel=4), (2, 3, 15, 13)),
    "rectangle": (dict(kernel=(2, 5)), (2, 3, 8, 20)),
    "no bias": (dict(kernel=4, bias=False), (2, 3, 8, 8)),
    "valid": (dict(kernel=4, padding="valid"), (2, 3, 8, 8)),
    "one channel": (dict(kernel=3, channels=1), (3, 1, 9, 9)),
    "one window": (dict(kernel=8), (2, 3, 8, 8)),
    "signal": (dict(kernel=6, rank=1), (2, 3, 25)),
    "video": (dict(kernel=(2, 4, 4), rank=3), (2, 3, 4, 8, 12)),
}


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("gradient_of_x", [False, True])
@pytest.mark.parametrize("options, shape", KINDS.values(), ids=KINDS)
def test_the_same_as_the_convolution(options, shape, gradient_of_x):
    """Value and gradients, no further from fp64 than eager is."""
    torch.manual_seed(0)
    model = Embedding(**options)
    x = torch.randn(shape, requires_grad=gradient_of_x)
    compiled = torch.compile(
        model, backend="fusion", options={"fusion.gate": "always"}, dynamic=False
    )
    fusion_backend.reset()
    y = model(x)
    dy = torch.randn_like(y)
    eager, ours = step(model, model, x, dy), step(compiled, model, x, dy)
    (site,) = fusion_backend.report().fused
    assert (site.pattern, site.forward, site.backward) == ("patch_embedding", "reference", "vjp")
    exact = step(
        model.double(), model, x.detach().double().requires_grad_(gradient_of_x), dy.double()
    )
    for one, other, true in zip(ours, eager, exact, strict=True):
        assert one.shape == other.shape and strides(one) == strides(other)
        assert (one - true).norm() <= 2 * (other - true).norm() + 1e-6 * true.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    torch.manual_seed(0)
    model, x = Embedding(4).to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    compiled = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    with torch.no_grad():
        ours, eager, exact = compiled(x), model(x), model.double()(x.double())
    assert ours.dtype == dtype and (ours - exact).norm() <= 1.1 * (eager - exact).norm()


def test_layouts_are_those_of_the_convolution():
    """Who looks at strides, or views the result, sees no difference."""
    weight = torch.randn(10, 3, 4, 4)
    for form in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 8, 8).to(memory_format=form)

        def fn(x, weight):
            y = F.conv2d(x, weight, stride=4)
            return y, y.permute(0, 2, 3, 1).contiguous().view(-1, 10)

        torch.compiler.reset()
        found = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})(x, weight)
        for one, other in zip(found, fn(x, weight), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()


@pytest.mark.usefixtures("eager_kernels")
def test_any_batch():
    model = Embedding(4)
    compiled = torch.compile(
        model, backend="fusion", options={"fusion.gate": "always"}, dynamic=True
    )
    fusion_backend.reset()
    for batch in (3, 5, 2):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert {site.pattern for site in fusion_backend.report().fused} <= {"patch_embedding"}


def test_autocast():
    model, x = Embedding(4), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    fusion_backend.reset()
    with torch.autocast("cpu", torch.bfloat16):
        y, want = compiled(x), model(x)
    assert y.dtype == want.dtype
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
    (site,) = fusion_backend.report().fused
    assert site.pattern == "patch_embedding"


OTHERS = {
    "overlapping": dict(kernel=4, stride=3),
    "gaps between windows": dict(kernel=4, stride=5),
    "padding": dict(kernel=4, padding=1),
    "padding by a word": dict(kernel=3, stride=1, padding="same"),
    "dilated": dict(kernel=2, dilation=2),
    "grouped": dict(kernel=4, channels=10, groups=2),
    "depthwise": dict(kernel=4, channels=10, groups=10),
    "single pixels": dict(kernel=1),
    "one stride of two": dict(kernel=(4, 4), stride=(4, 2)),
    "transposed rectangle": dict(kernel=(2, 4), stride=(4, 2)),
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_what_is_another_convolution(options):
    x = torch.randn(2, options.get("channels", 3), 12, 12)
    model = Embedding(**options)
    assert not collect(model, x, options={"fusion.gate": "always"}).report.sites
    assert_fuses(model, x, pattern="patch_embedding", count=0)


def test_a_single_image_is_left_alone():
    """Without a batch dimension, as torch allows."""
    model, x = nn.Conv2d(3, 10, 4, stride=4), torch.randn(3, 8, 8)
    assert not collect(model, x, options={"fusion.gate": "always"}).report.sites


@pytest.mark.usefixtures("eager_kernels")
def test_sizes_that_are_not_known():
    """Left alone, so that it compiles no more often than without us: cutting windows would guard on
    their number.
    """
    model = nn.Conv2d(3, 10, 4, stride=4)
    graphs = {}
    for backend in ("inductor", "fusion"):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, backend=counter, dynamic=True)
        for height, width in ((8, 8), (12, 16), (18, 21), (20, 23), (40, 8)):
            x = torch.randn(2, 3, height, width)
            torch.testing.assert_close(compiled(x), model(x))
        graphs[backend] = counter.frame_count
    assert graphs["fusion"] <= graphs["inductor"]
