"""Kernels that work on elements, against fp64, in Triton's interpreter or on a GPU."""

import pytest
import torch

from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from tests.kernel_checks import DEVICE, FLOATS, check_value, randn, runs_kernels

pytestmark = pytest.mark.usefixtures("poisoned_empties")


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1003), (2, 3, 2049), (0, 5)])
def test_elementwise(shape, dtype):
    x, y, z = (randn(*shape, dtype=dtype) for _ in range(3))
    check_value("add_mul", x, y, z)
    check_value("add_mul", x, y, 0.3)
    check_value("add_mul_exp", x, y, 0.3)


@runs_kernels
def test_elementwise_keeps_a_permuted_layout():
    x, y, z = (randn(3, 70, 5).permute(2, 0, 1) for _ in range(3))
    assert check_value("add_mul", x, y, z).stride() == x.stride()
    check_value("add_mul_exp", x, y, -1.0)


@runs_kernels
def test_exponential_at_the_ends():
    s = torch.tensor(
        [0.0, -0.0, 88.7, 89.0, -87.0, -200.0, float("inf"), -float("inf"), float("nan")],
        device=DEVICE,
    )
    got, want = FUSION_RULES["add_mul_exp"].kernel_fn(s, torch.zeros_like(s), 1.0), torch.exp(s)
    # The interpreter rounds inside an fma.
    torch.testing.assert_close(
        got, want, rtol=3e-7 if DEVICE == "cuda" else 1e-5, atol=0, equal_nan=True
    )


@runs_kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter rounds inside an fma")
def test_exponential_within_three_ulps():
    s = torch.linspace(-87, 88, 100_003, device=DEVICE)
    got = FUSION_RULES["add_mul_exp"].kernel_fn(s, torch.zeros_like(s), 1.0)
    assert ((got.double() / s.double().exp() - 1).abs() < 3 * 2**-23).all()


def test_elementwise_refusals():
    x, y = randn(4, 6), randn(4, 6)
    guard = FUSION_RULES["add_mul"].guard_fn
    for args, sentence in [
        ((x.double(), y, 1.0), "float64"),
        ((x, y.half(), 1.0), "x is torch.float32 and y is torch.float16"),
        ((x, y[0], 1.0), "x and y differ in memory"),
        ((x, y.t().contiguous().t(), 1.0), "x and y differ in memory"),
        ((x[:, ::2], y[:, ::2], 1.0), "x is not dense"),
        ((x[:1].expand(4, 6), y, 1.0), "x is not dense"),
        ((x, y, x[:, 0]), "x and z differ in memory"),
    ]:
        answer = guard(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason
