"""GELU without branches: the formula against fp64, for every number of 16 bits there is, and where
it applies.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.gelu import branchless_gelu

from fusion_backend.testing import assert_fuses, collect

HALF = [torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("approximate", ["none", "tanh"])


def numbers(dtype):
    """All of a dtype."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def value(x, approximate):
    return F.gelu(x, approximate=approximate)


def gradient(x, approximate):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(value(leaf, approximate).sum(), leaf)[0]


def mine(x, approximate):
    return branchless_gelu.reference(x, approximate)


def my_gradient(x, approximate):
    return branchless_gelu.backward_fn(
        SimpleNamespace(x=x, approximate=approximate), torch.ones_like(x)
    )


@both
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "found, truth", [(mine, value), (my_gradient, gradient)], ids=["value", "gradient"]
)
def test_every_number(found, truth, dtype, approximate):
    x = numbers(dtype)
    x = x[x.isfinite() & (x.abs() < 1e15)]  # beyond, the derivative of eager's tanh form is NaN
    exact = truth(x.double(), approximate)
    ours, eager = (fn(x, approximate).double() for fn in (found, truth))
    assert ours.isfinite().all()
    assert (ours - exact).abs().max() <= (eager - exact).abs().max()
    assert (ours - exact).norm() <= (eager - exact).norm() * 1.001
    # the rounding of the result, 2⁻⁹ or 2⁻¹², and hardly more; fp32 with erf(x) + 1 loses it there
    near = x.abs() < 5
    relative = ((ours - exact) / exact).abs()[near & (exact.abs() > torch.finfo(dtype).tiny * 8)]
    assert relative.max() <= torch.finfo(dtype).eps / 2 * 1.02 or found is my_gradient


@both
def test_the_formula_itself(approximate):
    """In fp32, before the rounding: 2⁻¹⁷ relative, down to -6, where fp32 with 1 + erf is off by as
    much as it is.
    """
    x = torch.linspace(-6, 6, 400_001)
    exact = value(x.double(), approximate)
    assert (((mine(x, approximate) - exact) / exact)[x != 0]).abs().max() < 2**-17
    slope = (my_gradient(x, approximate) - gradient(x.double(), approximate)).abs()
    assert slope.max() < 2**-17


@both
@pytest.mark.parametrize("dtype", HALF)
def test_special_numbers(dtype, approximate):
    largest = torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, largest, -largest], dtype=dtype)
    want = torch.tensor([math.inf, math.nan, math.nan, 0.0, -0.0, largest, -0.0], dtype=dtype)
    torch.testing.assert_close(mine(x, approximate), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine(x, approximate)[3:].signbit(), want[3:].signbit())


def by_hand(x):
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


def functions():
    yield "exact", F.gelu
    yield "module", torch.nn.GELU("tanh")
    yield "by hand", by_hand
    yield "by hand, exact", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    yield "upcast", lambda x: F.gelu(x.float()).to(x.dtype)


@pytest.mark.parametrize("fn", [pytest.param(fn, id=name) for name, fn in functions()])
@pytest.mark.parametrize("training", [False, True])
def test_where_it_fuses(fn, training):
    x = torch.randn(3, 5, 7, dtype=torch.bfloat16, requires_grad=training)
    options = {"fusion.only": "gelu"}  # with every gate open add_mul would take a part of it
    assert_fuses(fn, x, pattern="gelu", options=options)
    assert_fuses(fn, x.detach().transpose(0, 2), pattern="gelu", options=options)


@pytest.mark.usefixtures("eager_kernels")
def test_what_it_declines():
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(8, dtype=dtype)
        (site,) = collect(F.gelu, x).report.sites
        assert site.pattern == "gelu" and not site.forward == "library"
        assert ("would be seen" if dtype == torch.float32 else "float64") in site.reason
        compiled = torch.compile(F.gelu, backend="fusion", options={"fusion.gate": "always"})
        torch.testing.assert_close(compiled(x), F.gelu(x))


def test_beside_larger_patterns():
    """A gated unit is taken whole; where it is declined, its gelu still is found."""

    def geglu(x):
        up, gate = x.chunk(2, -1)
        return up * F.gelu(gate)

    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert_fuses(geglu, x, pattern="gated_act")
    assert_fuses(geglu, x, pattern="gelu", count=0)


@pytest.mark.full
def test_the_input_is_all_that_is_kept():
    """As with plain Inductor: what backward needs it computes from x."""
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    compiled = torch.compile(F.gelu, backend="fusion", options={"fusion.gate": "always"})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = compiled(x)
    assert sum(t.numel() * t.element_size() for t in kept) == x.numel() * 2
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(found, gradient(x, "none"), rtol=2e-2, atol=1e-2)
