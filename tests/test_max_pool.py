"""Max pooling: what is found, what is left alone, and the kernels against torch's."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.kernels.images import max_pool as kernels
from fusion_backend.kernels.images.tiles import Tile
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Settled
from fusion_backend.testing import assert_fuses
from tests.kernel_checks import FLOATS, check, check_training, randn, runs_kernels, symbolic
from tests.measured_cases import Answers, as_on_a_gpu, decided
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "max_pool"
PATTERN = FUSION_RULES[NAME]
LAST = torch.channels_last
# of a stem, side by side, with gaps between them, that overlap by all but one, of another width
# than height, whose last ones end outside, of one element, of the whole image
WINDOWS = [
    "3,3 2,2 1,1",
    "2,2 2,2 0,0",
    "2,2 3,3 0,0",
    "3,3 1,1 1,1",
    "3,2 2,1 1,0",
    "3,3 2,2 0,0 ceil",
    "2,2 2,2 1,1 ceil",
    "1,1 1,1 0,0",
    "7,5 7,5 0,0",
]
SHAPES = [(2, 3, 7, 5), (1, 70, 8, 9), (3, 1, 13, 40)]


# The kernels


@runs_kernels
@product(windows=WINDOWS, shape=SHAPES, last=[False, True], dtype=FLOATS)
def test_windows_shapes_formats_and_dtypes(windows, shape, last, dtype):
    x = randn(*shape, dtype=dtype)
    check(NAME, x.contiguous(memory_format=LAST) if last else x, windows)


@runs_kernels
@pytest.mark.parametrize("windows", WINDOWS)
def test_of_equal_elements_the_first_and_of_nan_the_last(windows):
    """The gradient goes where torch's goes."""
    x = randn(2, 3, 14, 15).round()
    x[0, 0, 2:9, 3], x[0, 1], x[1, 2, 4:8] = math.nan, -math.inf, math.inf
    want, at = kernels.windows_of(windows).pool(x, indices=True)
    y, kept = kernels.forward(x, windows, save=True)
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kept, kernels.places_of(x, windows))
    dy = randn(*y.shape)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(kernels.windows_of(windows).pool(leaf), leaf, dy)
    torch.testing.assert_close(kernels.backward(dy, x, kept, windows), dx)


@pytest.mark.parametrize("windows", [*WINDOWS, "3,3 5,5 1,1 ceil", "2,2 3,3 1,1 ceil"])
def test_sizes_are_those_of_torch(windows):
    of = kernels.windows_of(windows)
    for h, w in itertools.product(range(8, 14), repeat=2):
        x = torch.empty(1, h, w)
        assert of.size(x) == tuple(of.pool(x).shape[-2:])


@runs_kernels
@pytest.mark.parametrize("tile", [(1, 16, 1), (8, 4, 1), (64, 32, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_tiles_of_any_size(tile, last):
    x, how, windows = randn(3, 5, 6, 7), Tile(*tile), "3,3 2,2 1,1"
    x = x.contiguous(memory_format=LAST) if last else x
    y, kept = kernels.forward(x, windows, True, how)
    assert torch.equal(y, PATTERN.reference(x, windows))
    dy, leaf = randn(*y.shape), x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(PATTERN.reference(leaf, windows), leaf, dy)
    torch.testing.assert_close(kernels.backward(dy, x, kept, windows, how), dx)


@runs_kernels
def test_a_gradient_of_any_strides():
    x, dy = randn(2, 3, 8, 10), randn(2, 5, 3, 4).permute(0, 2, 3, 1)
    windows = "2,2 2,2 0,0"
    _, kept = kernels.forward(x, windows, save=True)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(PATTERN.reference(leaf, windows), leaf, dy)
    torch.testing.assert_close(kernels.backward(dy, x, kept, windows), dx)


@runs_kernels
def test_places_are_written_for_a_gradient_alone():
    _, kept = kernels.forward(randn(2, 3, 8, 8), "2,2 2,2 0,0", save=False)
    assert not kept.numel()


def test_what_the_kernel_refuses():
    x = torch.randn(2, 6, 14, 15)
    refused = {
        "neither": x[..., ::2],
        "float64": x.double(),
        "3 dimensions": x[0],
        "a side of more": torch.empty(1, 1, 2, 1 << 16, device="meta"),
    }
    for why, value in refused.items():
        assert why in str(PATTERN.guard_fn(value, "2,2 2,2 0,0")), why
    assert "144 elements" in str(PATTERN.guard_fn(x, "12,12 2,2 0,0"))
    assert PATTERN.guard_fn(x, "11,11 2,2 0,0") is None
    for large in (8, 64, 224, 224), (8, 64, 256, 256), (2, 64, 1024, 1024):
        images = torch.empty(large, dtype=torch.bfloat16, device="meta")
        assert PATTERN.guard_fn(images, "3,3 2,2 1,1") is None
        assert PATTERN.guard_fn(images.to(memory_format=LAST), "3,3 2,2 1,1") is None
    # tiles of 512 images
    small = torch.empty(5000, 1, 2050, 2050, device="meta")
    assert "images of a tile" in str(PATTERN.guard_fn(small, "11,11 2050,2050 0,0"))
    _, (fake,) = symbolic(x)
    assert "dynamic" in str(PATTERN.guard_fn(fake, "2,2 2,2 0,0"))


def test_without_a_gradient_it_is_left_to_inductor():
    x = torch.randn(2, 6, 4, 5)
    assert isinstance(PATTERN.worthwhile_fn(x, "2,2 2,2 0,0", training=False), Settled)
    assert not isinstance(PATTERN.worthwhile_fn(x, "2,2 2,2 0,0", training=True), Settled)


# What is found


FOUND = {
    "a number": lambda x: F.max_pool2d(x, 2),
    "two numbers": lambda x: F.max_pool2d(x, (3, 2), (2, 1)),
    "with padding": lambda x: F.max_pool2d(x, 3, 2, padding=1),
    "outside": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "torch": lambda x: torch.max_pool2d(x, [3, 3], [2, 2], [1, 1]),
    "a module": nn.MaxPool2d(3, stride=2, padding=1),
    "between others": lambda x: F.max_pool2d(x.relu(), 2).exp() + 1,
}


@pytest.mark.parametrize("fn", FOUND.values(), ids=FOUND)
def test_spellings(fn):
    assert_fuses(fn, torch.randn(2, 3, 6, 7), pattern=NAME)


LEFT_ALONE = {
    "with gaps": lambda x: F.max_pool2d(x, 2, dilation=2),
    "one image": lambda x: F.max_pool2d(x[0], 2),
    "with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "means": lambda x: F.avg_pool2d(x, 2),
    "of one dimension": lambda x: F.max_pool1d(x[0], 2),
    "of volumes": lambda x: F.max_pool3d(x, 2),
    "of a given size": lambda x: F.adaptive_max_pool2d(x, 3),
    "of any number of elements": lambda x: F.fractional_max_pool2d(x, 2, 3),
}


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn):
    assert_fuses(fn, torch.randn(2, 3, 7, 7), pattern=NAME, count=0)


# In whole functions


@runs_kernels
@pytest.mark.parametrize("last", [False, True])
def test_a_stem_trains(last):
    layers = nn.Conv2d(3, 9, 3, bias=False), nn.BatchNorm2d(9), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    stem, x = nn.Sequential(*layers, nn.Conv2d(9, 4, 1)), torch.randn(2, 3, 9, 11)
    if last:
        stem, x = stem.to(memory_format=LAST), x.to(memory_format=LAST)
    check_training(NAME, stem, x, False)


def test_under_autocast():
    conv = nn.Conv2d(6, 9, 1)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.max_pool2d(conv(x), 2)

    assert_fuses(fn, torch.randn(2, 6, 5, 7), pattern=NAME)


def test_a_batch_of_any_size():
    x = torch.randn(3, 6, 5, 7)
    torch._dynamo.mark_dynamic(x, 0)
    assert_fuses(nn.Sequential(nn.Conv2d(6, 9, 1), nn.MaxPool2d(2)), x, pattern=NAME)


@pytest.mark.parametrize("grad", [False, True])
def test_in_training_alone_it_is_measured(monkeypatch, tmp_path, grad):
    x = torch.randn(32, 64, 112, 112, requires_grad=grad)
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(max_pool=2.0)):
        with torch.set_grad_enabled(grad):
            record = decided(lambda x: F.max_pool2d(x * 2, 3, 2, 1), x)
    (site,) = (s for s in record.sites if s.pattern == NAME)
    assert site.fused is grad, site


@pytest.mark.parametrize(
    ("channels", "last", "taken"),
    [(3, False, True), (64, False, False), (64, True, True)],
    ids=["pixels", "many channels", "channels-last"],
)
def test_behind_a_convolution_the_format_is_known(monkeypatch, tmp_path, channels, last, taken):
    """In pixels the graph is laid out as by Inductor; from other images it is known to differ."""
    conv = nn.Conv2d(channels, 64, 3, padding=1)
    form = LAST if last else torch.contiguous_format
    x = torch.randn(32, channels, 64, 64).to(memory_format=form)
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(max_pool=2.0)):
        record = decided(lambda x: F.max_pool2d(conv(x).relu(), 2), x)
    (site,) = (s for s in record.sites if s.pattern == NAME)
    assert site.fused is taken, site
    assert ("from conv2d, which Inductor computes channels-last" in site.reason) is not taken, site
    assert record.channels_last is (channels == 3)
