"""A copy or view that is made without grad mode equals its source, but passes no gradient on."""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend
from fusion_backend.testing import collect

pytestmark = pytest.mark.usefixtures("eager_kernels")

CONSTANT = {
    "copy": lambda y: y.clone(),
    "copy in another order": lambda y: y.t().contiguous().t(),
    "view": lambda y: y.view(8, 16),
    "views that undo each other": lambda y: y.t().t(),
    "computed again": lambda y: y * 1,
}


def norm_of(z, weight):
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


SITES = {
    "norm": norm_of,
    "softmax": lambda z, weight: torch.softmax(z, -1) * weight,
    "gelu": lambda z, weight: F.gelu(z) * weight,
}


PATTERNS = {"norm": "rms_norm", "softmax": "softmax", "gelu": "gelu"}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("constant", CONSTANT)
@pytest.mark.parametrize("first", [False, True], ids=["behind", "in front"])
def test_gradients_stop_where_they_do_in_eager(site, constant, first):
    def fn(x, weight):
        y = x * 3
        if first:
            y = y.sin()
        with torch.no_grad():
            z = CONSTANT[constant](y)
        return SITES[site](z, weight), SITES[site](y, weight) if first else y.cos()

    fused = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    x = torch.randn(8, 16)
    found = []
    for run in (fused, fn):
        inputs = x.clone().requires_grad_(), torch.ones(16, requires_grad=True)
        results = run(*inputs)
        assert all(r.requires_grad for r in results)
        found.append(torch.autograd.grad(sum(r.sin().sum() for r in results), inputs))
    torch.testing.assert_close(*found)
    sites = fusion_backend.report().graphs[-1].sites
    assert any(s.fused and s.pattern == PATTERNS[site] for s in sites)


def frozen_and_trained(x, frozen, trained):
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(F.linear(x, frozen)) * F.linear(x, trained)


def a_zero_of_each(x, frozen, trained):
    zero = torch.zeros_like(trained)
    h = F.linear(x, frozen, frozen[0])
    return torch.maximum(h, torch.zeros_like(h)), zero


@pytest.mark.parametrize(
    ("fn", "pattern"), [(frozen_and_trained, "gated_linear"), (a_zero_of_each, "linear_act")]
)
def test_equal_values_of_one_grad_mode_are_one(fn, pattern):
    """Though the flags of what they are computed from, and for, differ."""
    x, frozen = torch.randn(16, 16), torch.randn(16, 16)
    report = collect(fn, x, frozen, torch.randn(16, 16, requires_grad=True)).report
    assert [s.pattern for s in report.fused] == [pattern]
