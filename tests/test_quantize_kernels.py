"""Kernels that quantise, by tensor and by token: the integers of eager code."""

import math

import pytest
import torch

from fusion_backend.kernels.quantize import quantize
from fusion_backend.kernels.quantize.scales import largest, scaled
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses, fused_nodes, rewritten, with_kernels
from tests.kernel_checks import DEVICE, FLOATS, PART, SHAPES, exact, randn, runs_kernels
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties")


def eager_int8(x, scale, zero_point):
    return FUSION_RULES["quantize_int8"].reference(x, scale, zero_point)


@runs_kernels
@pytest.mark.parametrize(
    "scale, zero_point", [(0.05, 3.0), (0.05, None), (1 / 3, 0.5), (0.1, -128.0), (1e-3, 0.0)]
)
def test_quantize_gives_eagers_integers(scale, zero_point):
    x = torch.cat([randn(20_000) * 8 * scale, randn(20_000) * 100 * scale])
    ties = (torch.arange(-300, 300, device=DEVICE) + 0.5) * scale
    x = torch.cat([x, ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1)])
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, scale, zero_point)
    assert got.dtype == torch.int8 and torch.equal(got, eager_int8(x, scale, zero_point))


@runs_kernels
def test_quantize_divides_as_torch_does_on_cuda():
    """By the reciprocal of the number as it was written: 1 / fp32(1e-3) would be 999.99994."""
    from fusion_backend.patterns.quantize_int8 import reciprocal

    found = [reciprocal(scale) for scale in (1e-3, 0.0625, 0.0, -0.0, 1e-40)]
    assert found == [1000.0, 16.0, math.inf, -math.inf, math.inf]


def test_quantize_rounds_half_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, -128.5, -129.5], device=DEVICE)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 1.0, None)
    assert got.tolist() == [0, 2, 2, 0, -2, -2, 126, 127, -128, -128]


@runs_kernels
def test_quantize_of_what_is_no_number():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0], device=DEVICE)
    for scale in (1.0, 1e-38, 1e30):
        got = FUSION_RULES["quantize_int8"].kernel_fn(x, scale, 2.0)
        assert torch.equal(got, eager_int8(x, scale, 2.0)), scale
    assert FUSION_RULES["quantize_int8"].kernel_fn(x, 1.0, None).tolist() == [
        0,
        127,
        -128,
        127,
        -128,
        0,
    ]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_of_half_precision_computes_in_fp32(dtype):
    x = randn(3, 1003, dtype=dtype)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 0.05, 3.0)
    assert torch.equal(got, eager_int8(x.float(), 0.05, 3.0))


def test_quantize_is_taken_of_large_tensors_in_bf16():
    worthwhile = FUSION_RULES["quantize_int8"].worthwhile_fn
    large = torch.empty(64_000_000, dtype=torch.bfloat16, device="meta")
    assert (
        worthwhile(large, 0.05, None, False) is None and worthwhile(large, 0.05, 3.0, True) is None
    )
    for x in (large.float(), large.half(), large[1:]):
        assert "alone" in worthwhile(x, 0.05, None, False).reason


@runs_kernels
def test_quantize_layouts():
    x = randn(3, 4, 5).permute(2, 0, 1)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 0.05, None)
    assert got.stride() == x.stride() and torch.equal(got, eager_int8(x, 0.05, None))
    assert FUSION_RULES["quantize_int8"].kernel_fn(x[:0], 0.05, None).shape == (0, 3, 4)


BY = ("scale", "reciprocal", "inverse")
# of numbers of up to 10: the last of each kind bounds all rows
BOUNDS = [(None, "largest"), (1e-5, "largest"), (20.0, "largest"), (1e-5, "scale"), (0.1, "scale")]


def of_the_scale(x, scale, by):
    """The integers of a scale, in fp32."""
    x, scale = x.float(), scale.float()
    units = dict(scale=x / scale, reciprocal=x * scale.reciprocal(), inverse=x * scale)[by]
    return torch.clamp(torch.round(units), -128, 127).to(torch.int8)


@runs_kernels
@product(shape=[*SHAPES, (0, 8)], eps=BOUNDS, by=BY, dtype=FLOATS)
def test_quantize_per_token(shape, eps, by, dtype):
    """The integers and scales of eager fp32; of a rounded scale, those of that scale."""
    eps, bound = eps if by != "inverse" else (eps[0], "largest")
    x = randn(*shape, dtype=dtype) * 3
    for config in (None, PART):
        how = config if config is not None and shape[-1] > config[0] else None
        q, scale = quantize.forward(x, None, None, None, eps, how, by=by, bound=bound)
        want, exactly = FUSION_RULES["quantize_per_token"].reference(
            x.float(), eps, by, bound, "none"
        )
        assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, exactly.shape)
        torch.testing.assert_close(
            scale.float(), exactly, rtol=0 if dtype == torch.float32 else 1e-2, atol=0
        )
        if dtype != torch.float32:
            want = of_the_scale(x, scale, by)
        assert torch.equal(q, want)


@runs_kernels
@product(
    shape=[(7, 100), (3, 2049), (2, 3, 5, 33), (0, 8)],
    eps=[None, 0.05],
    by=BY,
    dtype=[torch.bfloat16, torch.float16],
)
def test_quantize_per_token_of_a_wide_copy(shape, eps, by, dtype):
    """x.float() is not written; the integers and scales are its own, to the last bit."""
    x = randn(*shape, dtype=dtype) * 3
    q, scale = FUSION_RULES["quantize_per_token"].launched(
        (x, eps, by, "largest", "fp32"), save=False
    )
    want, exactly = FUSION_RULES["quantize_per_token"].reference(x, eps, by, "largest", "fp32")
    assert scale.dtype == torch.float32 and torch.equal(scale, exactly)
    assert torch.equal(q, want)


@runs_kernels
@product(
    shape=[(1, 1), (7, 100), (3, 300), (2, 3, 5, 33), (100,), (2, 128, 5), (0, 8)],
    scales=[(True, None, None), (True, 1.0, 0.05), (False, None, 1e-5)],
    by=BY,
    dtype=FLOATS,
)
def test_rms_norm_quantize(shape, scales, by, dtype):
    """Scale within its dtype; the integers of that scale, but where the quotient is half way
    between two.
    """
    weight, offset, eps = scales
    bound = "largest" if eps is None or by == "inverse" else "scale"
    x = (
        (randn(2 * shape[0], *shape[1:], dtype=dtype) * 3)[::2]
        if len(shape) == 2
        else randn(*shape, dtype=dtype)
    )
    w = randn(shape[-1], dtype=dtype) if weight else None
    args = x, w, offset, 1e-6
    assert FUSION_RULES["rms_norm_quantize"].guard_fn(*args, eps, by, bound) is None
    y = FUSION_RULES["rms_norm"].reference(exact(x), exact(w), offset, 1e-6)
    for config in (None, PART) if shape[-1] > PART[0] else (None,):
        q, scale = quantize.forward(*args, eps, config, by=by, bound=bound)
        assert (q.dtype, q.shape, scale.dtype, scale.shape) == (
            torch.int8,
            x.shape,
            dtype,
            (*x.shape[:-1], 1),
        )
        _, want = scaled(y, largest(y), eps, by, bound)
        torch.testing.assert_close(
            scale.double(), want, rtol=3e-6 if dtype == torch.float32 else 1e-2, atol=0
        )
        quotients = y * scale.double() if by == "inverse" else y / scale.double()
        quotients = quotients.clamp(max=127)
        assert ((q - quotients).abs() <= 0.5 + 1e-4).all()


@runs_kernels
@pytest.mark.parametrize("by", BY)
def test_rms_norm_quantize_of_nan_infinity_and_zero(by):
    x = randn(5, 40)
    x[1, 3], x[2, 4], x[3] = math.nan, math.inf, 0.0
    args = x, None, None, 1e-6, None, by, "largest"
    q, scale = FUSION_RULES["rms_norm_quantize"].launched(args, save=False)
    want, exactly = FUSION_RULES["rms_norm_quantize"].reference(*args)
    torch.testing.assert_close(scale, exactly, equal_nan=True)
    assert not q[1:4].any() and not want[1:4].any()
    assert (q[[0, 4]] - want[[0, 4]]).abs().max() <= 1 and q[0].any()


@runs_kernels
@pytest.mark.parametrize("by", BY)
def test_quantize_per_token_of_tiny_and_huge_numbers(by):
    for power in (-140, -120, -100, -60, -20, 100, 125):
        args = randn(4, 60) * 2.0**power, None, by, "largest", "none"
        got = FUSION_RULES["quantize_per_token"].launched(args, save=False)
        for g, w in zip(got, FUSION_RULES["quantize_per_token"].reference(*args), strict=True):
            assert torch.equal(g, w), power


@runs_kernels
@pytest.mark.parametrize("by", BY)
def test_quantize_per_token_of_nan_infinity_and_zero(by):
    x = randn(4, 40)
    x[1, 3], x[2], x[3, 5] = math.nan, 0.0, math.inf
    args = x, None, by, "largest", "none"
    q, scale = FUSION_RULES["quantize_per_token"].launched(args, save=False)
    torch.testing.assert_close(
        scale, FUSION_RULES["quantize_per_token"].reference(*args)[1], equal_nan=True
    )
    assert not q[1:].any() and q[0].any()


def divided(x):
    top = x.abs().amax(-1, keepdim=True)
    return torch.clamp(torch.round(x / (top / 127)), -128, 127).to(torch.int8), top / 127


def by_both_ends(x):
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = torch.maximum(-low, high) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def by_the_larger_end(x):
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = torch.maximum(low, high) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


@runs_kernels
def test_the_largest_is_not_the_largest_magnitude():
    assert not fused_nodes(rewritten(by_the_larger_end, torch.randn(4, 64, device=DEVICE)))


def inverted(x):
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return torch.clamp(torch.round(x * scale), -128, 127).to(torch.int8), scale


def as_in_bitnet(x):
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127).to(torch.int8), scale


def by_reciprocal(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x * scale.reciprocal()), -128, 127).to(torch.int8), scale


def by_one_over(x):
    scale = torch.clamp(x.abs().amax(-1, keepdim=True) / 127, min=1e-6)
    return torch.clamp(torch.round(x * (1.0 / scale)), -127, 127).to(torch.int8), scale


@runs_kernels
@pytest.mark.parametrize(
    "fn, by",
    [
        (divided, "scale"),
        (by_both_ends, "scale"),
        (inverted, "inverse"),
        (as_in_bitnet, "inverse"),
        (by_reciprocal, "reciprocal"),
        (by_one_over, "reciprocal"),
    ],
)
def test_an_inverted_scale_gives_its_own_integers(fn, by):
    """It is rounded once more, which shows half way between two integers."""
    scale = torch.rand(64, 1, device=DEVICE) + 0.5
    x = torch.cat([127 * scale, (torch.arange(-127, 127, device=DEVICE) + 0.5) * scale], 1)
    gm = rewritten(fn, x)
    (node,) = fused_nodes(gm)
    assert node.target is torch.ops.fusion.quantize_per_token.default and node.args[2] == by
    q, _ = with_kernels(gm)(x)
    assert torch.equal(q, fn(x)[0])
    reference = FUSION_RULES["quantize_per_token"].reference
    others = [reference(x, None, b, "largest", "none")[0] for b in BY if b != by]
    assert all((q != other).any() for other in others)


def of_a_wide_copy(x):
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def of_a_narrow_maximum(x):
    scale = x.abs().max(-1, keepdim=True).values.float().clamp(min=1e-5) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def with_a_wide_inverse(x):
    scale = 127 / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5)
    return (x * scale).round().to(torch.int8), scale


@pytest.mark.parametrize("fn", [of_a_wide_copy, with_a_wide_inverse])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_narrow_tensor_is_read(fn, dtype):
    x = torch.randn(64, 512, device=DEVICE, dtype=dtype)
    gm = rewritten(fn, x)
    (node,) = fused_nodes(gm)
    assert node.args[4] == "fp32" and node.args[0].op == "placeholder"


def multiplied_by_the_scale(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x * scale), -128, 127).to(torch.int8), scale


def divided_by_the_inverse(x):
    scale = 127 / x.abs().amax(-1, keepdim=True)
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale


def to_four_bits(x):
    scale = 7 / x.abs().amax(-1, keepdim=True)
    return torch.clamp(torch.round(x * scale), -8, 7).to(torch.int8), scale


def cut_off_below_the_largest(x):
    scale = 127 / x.abs().amax(-1, keepdim=True)
    return torch.clamp(torch.round(x * scale), -64, 63).to(torch.int8), scale


def by_the_scale_of_another(x):
    """Without a clamp, its integers may overflow."""
    scale = 127 / (x + 1).abs().amax(-1, keepdim=True)
    return torch.round(x * scale).to(torch.int8), scale


def by_the_largest_without_a_sign(x):
    scale = 127 / x.amax(-1, keepdim=True)
    return torch.round(x * scale).to(torch.int8), scale


def of_a_copy_in_fp64(x):
    x = x.double()
    scale = 127 / x.abs().amax(-1, keepdim=True)
    return torch.round(x * scale).to(torch.int8), scale


@pytest.mark.parametrize(
    "fn",
    [
        multiplied_by_the_scale,
        divided_by_the_inverse,
        to_four_bits,
        cut_off_below_the_largest,
        by_the_scale_of_another,
        by_the_largest_without_a_sign,
        of_a_copy_in_fp64,
    ],
)
def test_what_is_not_this_quantisation_is_left_alone(fn):
    assert_fuses(fn, torch.randn(64, 512), pattern="quantize_per_token", count=0)


def rescaled(x, w):
    """The scale of a token is a number of each row, as it is kept for the product."""
    scale = x.abs().amax(-1).clamp(min=1e-5) / 127
    q = (x / scale.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
    return (q.float() @ w) * scale[..., None]


def test_a_scale_without_the_last_dimension():
    x, w = torch.randn(3, 5, 64), torch.randn(64, 8)
    graph = rewritten(rescaled, x, w)
    assert [str(n.target) for n in fused_nodes(graph)] == ["fusion.quantize_per_token.default"]
    torch.testing.assert_close(with_kernels(graph)(x, w)[0], rescaled(x, w))


def test_such_a_scale_that_is_returned_is_left_alone():
    def fn(x):
        scale = x.abs().amax(-1) / 127
        return (x / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale

    report = assert_fuses(fn, torch.randn(5, 64), pattern="quantize_per_token", count=0)
    (reason,) = {s.reason for s in report.sites if s.pattern == "quantize_per_token"}
    assert reason.startswith("the result of div inside it is used elsewhere too")
