"""image_convolution: its kernels against fp64, and the models in which it is found."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.conv.library import windows_of
from fusion_backend.kernels.conv.pixels import described, forward, like, weight_gradient
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses, collect
from tests.kernel_checks import DEVICE, Kernels, check, distance, randn, runs_kernels
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "image_convolution"
PATTERN = FUSION_RULES[NAME]
LAST, PLANES = torch.channels_last, torch.contiguous_format
HALVES = [torch.bfloat16, torch.float16]
# sizes of x, of weight, and how the windows lie
CASES = {
    "a ResNet's": ((2, 3, 17, 19), (20, 3, 7, 7), "2,2 3,3 1,1 1"),
    "a MobileNet's": ((2, 3, 12, 10), (32, 3, 3, 3), "2,2 1,1 1,1 1"),
    "a VAE's": ((2, 4, 8, 8), (130, 4, 3, 3), "1,1 1,1 1,1 1"),
    "one channel": ((3, 1, 9, 8), (6, 1, 5, 3), "1,2 2,0 1,1 1"),
    "side by side": ((2, 2, 8, 12), (17, 2, 4, 4), "4,4 0,0 1,1 1"),
    "one pixel": ((5, 3, 7, 7), (16, 3, 7, 7), "1,1 0,0 1,1 1"),
    "wide padding": ((1, 3, 3, 2), (16, 3, 3, 3), "1,1 4,5 1,1 1"),
    "gaps between windows": ((1, 3, 11, 12), (16, 3, 2, 2), "3,4 1,0 1,1 1"),
}


def images(*shape, dtype=torch.bfloat16, form=PLANES):
    return randn(*shape, dtype=dtype).contiguous(memory_format=form)


@runs_kernels
@product(case=[*CASES], dtype=HALVES, form=[PLANES, LAST], bias=[False, True])
def test_shapes_and_dtypes(case, dtype, form, bias):
    of_x, of_weight, windows = CASES[case]
    weight = randn(*of_weight, dtype=dtype)
    vector = randn(of_weight[0], dtype=dtype) if bias else None
    check(NAME, images(*of_x, dtype=dtype, form=form), weight, vector, windows)


@runs_kernels
@pytest.mark.parametrize("needs", [["x"], ["weight"], ["bias"], ["x", "bias"]])
def test_only_what_is_needed(needs):
    of_x, of_weight, windows = CASES["a MobileNet's"]
    weight, bias = randn(*of_weight).bfloat16(), randn(of_weight[0]).bfloat16()
    check(NAME, images(*of_x), weight, bias, windows, needs=needs)


@runs_kernels
@pytest.mark.parametrize("form", [PLANES, LAST])
def test_layouts(form):
    """The result lies as that of conv2d; weights and images may lie in any way."""
    of_x, of_weight, windows = CASES["a ResNet's"]
    x, weight = images(*of_x), images(*of_weight, form=form)
    check(NAME, x, weight, None, windows)
    check(NAME, x.transpose(2, 3), weight, None, windows)
    check(NAME, images(2, 3, 34, 19)[:, :, ::2], weight, None, windows)
    check(NAME, images(1, 3, 17, 19).expand(2, 3, 17, 19), weight, None, windows)


@runs_kernels
def test_a_result_that_is_channels_last_though_the_image_is_not():
    """As in a graph whose image was laid out for the convolution alone."""
    of_x, of_weight, windows = CASES["a ResNet's"]
    x, weight = images(*of_x), randn(*of_weight).bfloat16()
    check(NAME, x, weight, None, f"{windows} last")
    how, last = described(f"{windows} last")
    assert last and described(windows) == (how, False)
    for form in (PLANES, LAST):
        given = x.contiguous(memory_format=form), weight, None, f"{windows} last"
        y = FUSION_RULES[NAME].kernel_fn(*given)
        assert y.is_contiguous(memory_format=LAST)


@runs_kernels
@pytest.mark.parametrize("pixels, programs", [(16, 1), (32, 3)])
@pytest.mark.parametrize("lies", ["planes", "last", "otherwise"])
def test_tiles(pixels, programs, lies):
    """Tiles that are not full, programs without one, and gradients that lie in any way."""
    of_x, of_weight, windows = CASES["a ResNet's"]
    how, x, weight = windows_of(windows), images(*of_x), randn(*of_weight).bfloat16()
    w64 = weight.double().requires_grad_()
    want = how.convolve(x.double(), w64, None)
    y = forward(x, weight, None, how, False, pixels)
    assert distance(y, want.detach()) < 0.01 and y.is_contiguous(memory_format=LAST)
    dy = images(*want.shape, form=LAST if lies == "last" else PLANES)
    if lies == "otherwise":
        dy = images(2, 20, want.shape[3], want.shape[2]).transpose(2, 3)
    found = weight_gradient(dy, x, weight, how, pixels, programs=programs)
    (exact,) = torch.autograd.grad(want, w64, dy.double())
    assert found.dtype == torch.float32 and distance(found, exact) < 1e-6
    assert like(weight, found).stride() == weight.stride()


def test_launches_for_batches_of_any_size():
    env, (of_x, of_weight, windows) = ShapeEnv(), CASES["a ResNet's"]
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3]
    how = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = FakeTensorMode(shape_env=env).from_tensor(images(*of_x), symbolic_context=how)
    launched = []
    with x.fake_mode, trial(lambda kernel, *rest: launched.append(kernel)):
        weight = torch.empty(of_weight, dtype=x.dtype, device=DEVICE)
        y = forward(x, weight, None, windows_of(windows), True)
        weight_gradient(y, x, weight, windows_of(windows))
    assert len(launched) == 2 and isinstance(x.shape[0], torch.SymInt) and not env.guards


# Where it is found


class Stem(nn.Module):
    """What a ResNet begins with."""

    def __init__(self, bias=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 7, 2, 3, bias=bias)
        self.norm, self.next = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return self.next(F.relu(self.norm(self.conv(x))))


def step(model, x, autocast=False):
    with torch.autocast(DEVICE, torch.bfloat16, autocast):
        y = model(x)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return [y.detach(), *torch.autograd.grad((y * weight).float().sum(), [*model.parameters()])]


@runs_kernels
@pytest.mark.parametrize("form", [PLANES, LAST])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network(form, autocast):
    """As near to fp64 as eager. The interpreter rounds to bf16 by cutting off."""
    model = Stem(bias=autocast).to(DEVICE).to(memory_format=form)
    x = images(2, 3, 18, 18, dtype=torch.float32, form=form)
    reference = copy.deepcopy(model).double()
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    plain, backend = copy.deepcopy(model), Kernels({"fusion.gate": "always"})
    got = step(torch.compile(model, backend=backend, dynamic=False), x, autocast)
    eager, want = step(plain, x, autocast), step(reference, x.double())
    for mine, its, right in zip(got, eager, want, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        assert distance(mine, right) <= 4 * distance(its, right) + 1e-3
    assert [s.pattern for s in backend.report.fused].count(NAME) == 1, backend.report


@runs_kernels
def test_dynamic_batches():
    """One graph for batches of any size, and a gradient of the images."""
    model = nn.Conv2d(3, 16, 3, 2, 1).to(DEVICE).bfloat16()
    backend = Kernels({"fusion.gate": "always"})
    compiled = torch.compile(model, backend=backend)
    for b in (3, 5, 9):
        x = images(b, 3, 8, 8).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        got, want = compiled(x), model(x)
        assert distance(got.detach(), want.detach()) < 0.02
        (mine,), (its,) = (torch.autograd.grad(y.float().square().sum(), x) for y in (got, want))
        assert distance(mine, its) < 0.02
    assert [s.pattern for s in backend.report.fused] == [NAME]


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype=torch.float32),
        dict(in_channels=5),
        dict(in_channels=4, groups=2),
        dict(dilation=2),
        dict(padding="same", stride=1),
    ],
)
def test_where_it_is_not_found(change):
    """In fp32, of more channels, in groups, with gaps, and with padding that is a word."""
    given = dict(in_channels=3, out_channels=16, kernel_size=3, stride=2, dtype=torch.bfloat16)
    model = nn.Conv2d(**given | change).to(DEVICE)
    x = images(2, model.in_channels, 32, 32, dtype=model.weight.dtype)
    assert_fuses(model, x, pattern=NAME, count=0)


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(x=randn(2, 3, 9, 9)), "weight is torch.bfloat16"),
        (dict(bias=randn(8)), "bias is torch.float32"),
        (dict(bias=images(16)[::2]), "bias"),
        (dict(weight=images(8, 3, 20, 20)), "20 × 20 pixels with 3 channels is too large"),
        (dict(windows="1,1 1,1 2,2 1"), "without dilation"),
        (dict(x=images(2, 3, 0, 9)), "empty"),
    ],
)
def test_what_is_refused(changed, reason):
    given = dict(x=images(2, 3, 9, 9), weight=images(8, 3, 3, 3), bias=None)
    given |= dict(windows="1,1 1,1 1,1 1")
    assert PATTERN.guard_fn(*given.values()) is None
    assert reason in PATTERN.guard_fn(*(given | changed).values()).reason


def test_nothing_else_is_called_for():
    """In inference without CUDA graphs a convolution of many channels is as it was."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(DEVICE).bfloat16()
    report = collect(model, images(2, 3, 9, 9)).report
    assert [s.pattern for s in report.sites] == [NAME]
