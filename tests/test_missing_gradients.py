"""What has no gradient in eager has none with fused sites either, not one of zeros."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusion_backend import Op
from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import fused_nodes

OPTIONS = {"fusion.gate": "always"}


def norm(h: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], w, w)


def dead(h, n):
    n.sin()
    return h.sin()


def dead_checkpoint(h, n):
    checkpoint(torch.sin, n, use_reentrant=False)
    return h.sin()


def detached(h, n):
    return h + n.detach()


def compared(h, n):
    return torch.where(n > 0, h, 0.0)


def without_grad(h, n):
    with torch.no_grad():
        scale = n.square().mean()
    return h * scale


@pytest.mark.parametrize("reader", [dead, dead_checkpoint, detached, compared, without_grad])
def test_a_norm_without_a_gradient_gives_none(reader):
    """Only the sum has one: w gets none, not one of zeros, which weight decay would act on."""

    def code(x, r, w):
        h = x + r
        return reader(h, norm(h, w))

    collector = Collector(OPTIONS)
    leaves = [torch.randn(*size, requires_grad=True) for size in ((3, 8), (3, 8), (8,))]
    torch.compile(code, backend=collector)(*leaves).sum().backward()
    assert [t.grad is None for t in leaves] == [False, False, True]
    (site,) = [s for s in collector.report.sites if s.pattern == "add_layer_norm"]
    assert not site.fused and site.reason.startswith("nobody asks for a gradient of the result")


@pytest.mark.parametrize("trains", [False, True])
def test_a_result_without_a_gradient_whose_tensors_have_one(trains):
    """The mean depends on x alone, as the norm does. If x has no gradient, the mean must not
    require one, nor what is written to memory from it.
    """

    def code(x, w, running):
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        running.copy_(mean.detach() + var.detach())
        return torch.batch_norm(x, w, None, None, None, True, 0.0, 1e-5, True)

    collector = Collector(OPTIONS)
    x = torch.randn(2, 4, 3, 3, requires_grad=trains)
    w, running = torch.randn(4, requires_grad=True), torch.zeros(4)
    torch.compile(code, backend=collector)(x, w, running).sum().backward()
    (site,) = [s for s in collector.report.sites if s.pattern == "batch_norm_training"]
    assert site.fused == trains and not running.requires_grad


def test_a_missing_gradient_goes_on_as_missing():
    """One call adds to both tensors, and the sum with the norm is not used: autograd hands the
    norm no gradient, and w gets none.
    """

    def code(x, w):
        return torch._foreach_add([norm(x, w), x], 1.0)[1]

    collector = Collector(OPTIONS)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.compile(code, backend=collector)(x, w).sum().backward()
    assert fused_nodes(collector.graphs[0]) and w.grad is None
    assert torch.equal(x.grad, torch.ones(3, 8))


def sum_too(x, r, w):
    h = x + r
    return norm(h, w), h


def test_a_sum_of_frozen_tensors_requires_no_gradient():
    """Only the weight of the norm is trained, as in the first layer behind frozen ones."""
    x, r, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, requires_grad=True)
    collector = Collector(OPTIONS)
    results = torch.compile(sum_too, backend=collector)(x, r, w)
    assert [t.requires_grad for t in results] == [t.requires_grad for t in sum_too(x, r, w)]
    (site,) = [s for s in collector.report.sites if s.pattern == "add_layer_norm"]
    assert not site.fused and "requires no gradient" in site.reason


@pytest.mark.usefixtures("scratch")
def test_a_gradient_of_its_own_in_place_of_the_same():
    """`same` holds where the backward returns None."""

    @Op
    def scaled_sum(x: Tensor, residual: Tensor, own: float) -> Tensor:
        return x + residual

    @scaled_sum.backward(plain=True, same={"residual": "x"})
    def _(saved, dy):
        return dy, saved.own * dy if saved.own else None

    leaves = [torch.ones(3, requires_grad=True) for _ in "xr"]
    for own, want in ((0.0, 1.0), (2.0, 2.0)):
        found = torch.autograd.grad(scaled_sum(*leaves, own).sum(), leaves)
        assert [g.tolist() for g in found] == [[1.0] * 3, [want] * 3]
