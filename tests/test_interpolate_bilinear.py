"""Bilinear interpolation: what is found, what is left alone, and the kernels against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.kernels.images import bilinear as kernels
from fusion_backend.kernels.images.tiles import Tile
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses
from tests.kernel_checks import (
    DEVICE,
    FLOATS,
    check,
    check_training,
    randn,
    runs_kernels,
    symbolic,
)
from tests.measured_cases import Answers, as_on_a_gpu, decided
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "interpolate_bilinear"
PATTERN = FUSION_RULES[NAME]
LAST = torch.channels_last
# enlarged by a whole number and by a fraction, made smaller, in one direction alone, one pixel, to
# one pixel, the same size, rows longer than a tile, more programs than rows of one image
SIZES = [
    (2, 3, 4, 5, 8, 10),
    (1, 2, 5, 7, 13, 11),
    (2, 2, 13, 17, 6, 5),
    (1, 2, 4, 9, 16, 3),
    (2, 3, 1, 1, 4, 5),
    (2, 3, 6, 5, 1, 1),
    (1, 3, 1, 6, 1, 13),
    (2, 2, 4, 5, 4, 5),
    (1, 1, 3, 9, 5, 1100),
    (3, 9, 2, 2, 33, 3),
]


def text(height, width, corners):
    return f"{height},{width}" + " align_corners" * corners


# The kernels


@runs_kernels
@product(size=SIZES, corners=[False, True], last=[False, True], dtype=FLOATS)
def test_sizes_formats_and_dtypes(size, corners, last, dtype):
    n, c, h, w, height, width = size
    x = randn(n, 15 + c if last else c, h, w, dtype=dtype)
    x = x.contiguous(memory_format=LAST) if last else x
    check(NAME, x, text(height, width, corners))


@runs_kernels
@pytest.mark.parametrize("size", [(4, 1, 16, 16, 3, 3), (1, 9, 9, 9, 2, 1), (40, 1, 1, 1, 9, 9)])
def test_a_tile_of_many_images(size):
    n, c, h, w, height, width = size
    check(NAME, randn(n, c, h, w), text(height, width, False))


@runs_kernels
@pytest.mark.parametrize("tile", [(1, 16, 1), (8, 4, 1), (64, 32, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_tiles_of_any_size(tile, last):
    x, how, target = randn(2, 16, 3, 5), Tile(*tile), "5,9"
    x = (x.contiguous(memory_format=LAST) if last else x).requires_grad_()
    y = PATTERN.reference(x, target)
    dy = randn(*y.shape)
    torch.testing.assert_close(kernels.forward(x.detach(), target, how), y.detach())
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(kernels.backward(dy, x.detach(), target, how), dx)


@runs_kernels
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("read", range(1, 24))
def test_every_output_is_counted_once(read, corners):
    """The gradient of a sum has as many parts as the result has pixels."""
    for written in (*range(1, 24), 97, 128):
        x, ones = torch.empty(1, 1, read, 1, device=DEVICE), torch.ones(1, 1, written, 1)
        dx = kernels.backward(ones.to(DEVICE), x, text(written, 1, corners))
        want = torch.ones_like(x, dtype=torch.float64).requires_grad_()
        y = PATTERN.reference(want, text(written, 1, corners))
        (want,) = torch.autograd.grad(y.sum(), want)
        torch.testing.assert_close(dx.double(), want, rtol=1e-5, atol=1e-5)


@runs_kernels
def test_a_gradient_of_any_strides():
    x, dy = randn(2, 3, 4, 5), randn(2, 10, 3, 8).permute(0, 2, 3, 1)
    want = torch.ops.aten.upsample_bilinear2d_backward(dy, [8, 10], [2, 3, 4, 5], False)
    torch.testing.assert_close(kernels.backward(dy, x, "8,10"), want)


@runs_kernels
def test_nan_and_infinities_stay_where_they_are():
    x = randn(1, 2, 4, 4)
    x[0, 0, 1, 2], x[0, 1, 3, 3] = torch.nan, torch.inf
    want = PATTERN.reference(x, "8,8")
    torch.testing.assert_close(kernels.forward(x, "8,8"), want, equal_nan=True)


def test_what_the_kernel_refuses():
    x = torch.randn(2, 6, 4, 5)
    refused = {
        "neither": torch.randn(2, 6, 4, 10)[..., ::2],
        "float64": x.double(),
        "a side of more": torch.empty(1, 1, 2, 1 << 16, device="meta"),
        "elements": torch.empty(1, 1024, 1024, 1024, device="meta").to(memory_format=LAST),
    }
    for why, value in refused.items():
        assert why in str(PATTERN.guard_fn(value, "8,8")), why
    assert "a side of more" in str(PATTERN.guard_fn(x, f"{1 << 16},8"))
    assert "elements" in str(PATTERN.guard_fn(x, "32768,32768"))
    pooled = torch.empty(8, 512, 2, 2).to(memory_format=LAST)
    assert PATTERN.guard_fn(pooled, "128,128") is None
    # small results of large images: a tile has 34 images of 2**27 elements
    large = torch.empty(20, 1, 16384, 8192, dtype=torch.float16, device="meta")
    assert "images of a tile" in str(PATTERN.guard_fn(large, "8,8"))
    assert PATTERN.guard_fn(large, "4096,4096") is None
    wide = torch.empty(1, 8192, 1, 64, device="meta").to(memory_format=LAST)
    assert "a row of more" in str(PATTERN.guard_fn(wide, "1,8192"))
    few = torch.empty(2, 15, 8, 8).to(memory_format=LAST)
    assert "16 channels" in str(PATTERN.guard_fn(few, "12,12"))
    assert PATTERN.guard_fn(few[:, :1].contiguous(), "12,12") is None
    _, (fake,) = symbolic(x)
    assert "dynamic" in str(PATTERN.guard_fn(fake, "8,8"))


# What is found


FOUND = {
    "a size": lambda x: F.interpolate(x, (8, 11), mode="bilinear"),
    "one number for both": lambda x: F.interpolate(x, 9, mode="bilinear", align_corners=False),
    "corners": lambda x: F.interpolate(x, (8, 11), mode="bilinear", align_corners=True),
    "a factor": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "two factors": lambda x: F.interpolate(x, scale_factor=(1.5, 3.0), mode="bilinear"),
    "a factor beside corners": lambda x: F.interpolate(
        x, scale_factor=1.3, mode="bilinear", align_corners=True
    ),
    "the size of a factor": lambda x: F.interpolate(
        x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True
    ),
    "a module": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "an old module": nn.UpsamplingBilinear2d(scale_factor=4),
    "an old function": lambda x: F.upsample(x, size=(8, 9), mode="bilinear"),
    "the size of another": lambda x: F.interpolate(x, x[:, :, 1:, 2:].shape[2:], mode="bilinear"),
    "between others": lambda x: F.interpolate(x.relu(), (8, 8), mode="bilinear").exp() + 1,
}


@pytest.mark.parametrize("fn", FOUND.values(), ids=FOUND)
def test_spellings(fn):
    assert_fuses(fn, torch.randn(2, 3, 4, 6), pattern=NAME)


LEFT_ALONE = {
    "a factor between whole sizes": lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"),
    "the nearest": lambda x: F.interpolate(x, (8, 8), mode="nearest"),
    "cubic": lambda x: F.interpolate(x, (8, 8), mode="bicubic"),
    "means of areas": lambda x: F.interpolate(x, (2, 3), mode="area"),
    "antialiased": lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True),
    "of one dimension": lambda x: F.interpolate(x[0], 8, mode="linear"),
    "of volumes": lambda x: F.interpolate(x[None], (3, 5, 7), mode="trilinear"),
    "of bytes": lambda x: F.interpolate(x.to(torch.uint8), (8, 8), mode="bilinear"),
}


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn):
    assert_fuses(fn, torch.randn(2, 3, 4, 6), pattern=NAME, count=0)


@pytest.mark.parametrize("corners", [False, True])
def test_corners_are_told_apart(corners):
    def fn(x):
        return F.interpolate(x, (9, 11), mode="bilinear", align_corners=corners)

    assert_fuses(fn, torch.randn(2, 3, 4, 6), pattern=NAME)


# In whole functions


@runs_kernels
def test_a_decoder_trains():
    layers = nn.Conv2d(6, 9, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(9, 4, 3)
    check_training(NAME, nn.Sequential(*layers), torch.randn(2, 6, 5, 7), False)


def test_under_autocast():
    conv = nn.Conv2d(6, 9, 1)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.interpolate(conv(x), (8, 8), mode="bilinear")

    assert_fuses(fn, torch.randn(2, 6, 5, 7), pattern=NAME)


@pytest.mark.parametrize(("dim", "count"), [(0, 1), (2, 0)])
def test_a_dynamic_batch_is_fused_and_a_dynamic_height_is_not(dim, count):
    head = nn.Sequential(nn.Conv2d(6, 9, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
    x = torch.randn(3, 6, 5, 7)
    torch._dynamo.mark_dynamic(x, dim)
    assert_fuses(head, x, pattern=NAME, count=count)


class Copied(nn.Conv2d):
    """The graph itself says how its result lies."""

    def forward(self, x):
        return super().forward(x).contiguous(memory_format=LAST)


def after(convolution):
    return lambda x: F.interpolate(convolution(x).relu() + 1, (256, 256), mode="bilinear")


@pytest.mark.parametrize(
    ("fn", "grad", "last", "settled"),
    [
        (after(nn.Conv2d(64, 64, 1)), False, False, True),
        (after(nn.Conv2d(64, 64, 1)), True, False, False),
        (after(nn.Conv2d(64, 64, 1).to(memory_format=LAST)), False, True, False),
        (after(nn.Identity()), False, False, False),
        (after(Copied(64, 64, 1)), False, False, False),
    ],
    ids=["without gradients", "with gradients", "channels-last", "no convolution", "copied"],
)
def test_in_inference_a_convolution_before_it_decides(
    monkeypatch, tmp_path, fn, grad, last, settled
):
    x = torch.randn(32, 64, 64, 64)
    x = x.to(memory_format=LAST) if last else x
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(interpolate_bilinear=2.0)):
        with torch.set_grad_enabled(grad):
            record = decided(fn, x.requires_grad_(grad))
    (site,) = (s for s in record.sites if s.pattern == NAME)
    assert site.fused is not settled, site
    assert ("from conv2d, which Inductor computes channels-last" in site.reason) is settled, site
