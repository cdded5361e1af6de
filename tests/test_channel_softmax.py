"""Softmax over channels and its logarithm: what is found, what is left alone, and the kernels
against fp64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.kernels.common.channel_tiles import Tile
from fusion_backend.kernels.softmax import channels as kernels
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses, collect
from tests.kernel_checks import FLOATS, check, check_training, randn, runs_kernels, symbolic
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "channel_softmax"
PATTERN = FUSION_RULES[NAME]
KINDS = ["softmax", "log_softmax", "difference"]
# one position; one channel; three dimensions and five; 1000 channels; planes that end within a tile
SHAPES = [(1, 96, 1), (3, 1, 5, 5), (2, 3, 2049), (3, 19, 7, 7), (2, 1000, 3, 3), (2, 6, 3, 4, 5)]


# The kernels


@runs_kernels
@product(shape=SHAPES, kind=KINDS, dtype=FLOATS)
def test_shapes_and_dtypes(shape, kind, dtype):
    x = randn(*shape, dtype=dtype)
    check(NAME, x, kind, "none", factor=5 if shape[1] > 1 else math.inf)


@runs_kernels
@product(kind=KINDS, dtype=[torch.bfloat16, torch.float16])
def test_a_cast_before_it_is_computed_inside(kind, dtype):
    (y,) = check(NAME, randn(2, 19, 6, 7, dtype=dtype), kind, "fp32")
    assert y.dtype == torch.float32


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_that_hold_few_positions_or_many(kind):
    x = randn(3, 5, 70)
    want = PATTERN.reference(x, kind, "none")
    for positions, warps in ((1, 1), (16, 2), (256, 4)):
        y = kernels.forward(x, x.dtype, kind, Tile(8, positions, warps))
        torch.testing.assert_close(y, want)


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nan_are_those_of_torch(kind):
    x = randn(2, 4, 6)
    x[0, 1, 0], x[0, :, 1], x[0, 2, 2], x[0, 3, 3] = -math.inf, -math.inf, math.inf, math.nan
    x[1, 1, 4], x[1, 2, 4] = math.inf, math.nan
    x[1, 0] += 1e4
    y = kernels.forward(x, x.dtype, kind)
    want = PATTERN.reference(x, kind, "none")
    torch.testing.assert_close(y, want, equal_nan=True)
    dy = randn(*x.shape)
    name = "_softmax_backward_data" if kind == "softmax" else "_log_softmax_backward_data"
    gradient = getattr(torch.ops.aten, name)(dy, want, 1, x.dtype)
    torch.testing.assert_close(kernels.backward(dy, y, x.dtype, kind), gradient, equal_nan=True)


@runs_kernels
def test_a_gradient_of_any_strides():
    x, dy = randn(2, 5, 6, 7), randn(2, 6, 7, 5).permute(0, 3, 1, 2)
    y = kernels.forward(x, x.dtype, "softmax")
    want = torch.ops.aten._softmax_backward_data(dy, y, 1, x.dtype)
    torch.testing.assert_close(kernels.backward(dy, y, x.dtype, "softmax"), want)


def test_what_the_kernel_refuses():
    x = torch.randn(2, 6, 4, 5)
    refused = {
        "channels-last": x.to(memory_format=torch.channels_last),
        "not dense": torch.randn(2, 6, 4, 10)[..., ::2],
        "1025 channels": torch.randn(1, 1025, 2),
        "fp64": x.double(),
    }
    for why, value in refused.items():
        reason = PATTERN.guard_fn(value, "softmax", "none")
        assert reason is not None, why
    _, (fake,) = symbolic(x)
    assert "dynamic" in str(PATTERN.guard_fn(fake, "softmax", "none"))


# What is found


FOUND = {
    "function": lambda x: F.softmax(x, 1),
    "from the right": lambda x: torch.softmax(x, dim=-3),
    "method": lambda x: x.softmax(1),
    "logarithm": lambda x: F.log_softmax(x, dim=1),
    "module": nn.Softmax2d(),
    "of a module": nn.Sequential(nn.Conv2d(6, 4, 1), nn.LogSoftmax(1)),
    "by hand": lambda x: (
        (x - x.amax(1, keepdim=True)).exp()
        / (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    ),
    "in fp32": lambda x: x.bfloat16().softmax(1, dtype=torch.float32),
    "a difference": lambda x: x - x.logsumexp(1, keepdim=True),
    "a difference with a dimension of its own": lambda x: -x.logsumexp(1).unsqueeze(1) + x,
    "scaled": lambda x: torch.softmax(x * 0.5, 1) * 2,
}


@pytest.mark.parametrize("fn", FOUND.values(), ids=FOUND)
def test_spellings(fn):
    assert_fuses(fn, torch.randn(2, 6, 4, 5), pattern=NAME)


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 3, 4), (2, 6, 2, 3, 4), (1, 6, 3, 4)])
def test_any_number_of_dimensions(shape):
    assert_fuses(lambda x: x.softmax(1), torch.randn(shape), pattern=NAME)


def without_gradient(x):
    with torch.no_grad():
        total = x.logsumexp(1, True)
    return x - total


LEFT_ALONE = {
    "over another dimension": lambda x: x.softmax(2),
    "over the samples": lambda x: x.softmax(0),
    "over the columns of a matrix": lambda x: x[0, 0].softmax(0),
    "over the last dimension": lambda x: x.softmax(-1),
    "the largest of another dimension": lambda x: (
        (x - x.amax(2, keepdim=True)).exp()
        / (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    ),
    "a logarithm of the sum alone": lambda x: x.logsumexp(1),
    "a difference with that of another dimension": lambda x: x - x.logsumexp(2, True),
    "a difference that broadcasts along the samples": lambda x: x - x.logsumexp(1).unsqueeze(0),
    "a difference without the dimension": lambda x: x[0] - x[0].logsumexp(1),
    "a difference the other way round": lambda x: x.logsumexp(1, True) - x,
    "a difference with a constant": lambda x: x - x.logsumexp(1, True).detach(),
    "a difference with the sum of a constant": lambda x: x - x.detach().logsumexp(1, True),
    "a sum without gradient": without_gradient,
}


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn):
    # every wrong dimension has the right size
    x = torch.randn(4, 4, 4, 4, requires_grad=True)
    collector = collect(fn, x, options={"fusion.only": NAME})
    assert not collector.report.fused, collector.report


# In whole functions


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_segmentation_head_trains(kind):
    last = nn.Softmax(1) if kind == "softmax" else nn.LogSoftmax(1)
    check_training(NAME, nn.Sequential(nn.Conv2d(6, 9, 1), last), torch.randn(2, 6, 5, 7), False)


def test_under_autocast():
    conv = nn.Conv2d(6, 9, 1)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return conv(x).softmax(1)

    assert_fuses(fn, torch.randn(2, 6, 5, 7), pattern=NAME)


def test_a_batch_of_any_size():
    head = nn.Sequential(nn.Conv2d(6, 9, 1), nn.Softmax(1))
    assert_fuses(head, torch.randn(3, 6, 5, 7), pattern=NAME, dynamic=True)
