"""The kernels of channel_norm against fp64, and what they refuse."""

import pytest
import torch

from fusion_backend.kernels.common.channel_tiles import Tile
from fusion_backend.kernels.norm import channel_norm as kernels
from fusion_backend.kernels.norm import channel_norm_backward as gradients
from fusion_backend.kernels.norm.channel_norm import ChannelNorm
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Unmeasured
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
