"""Code that writes to memory gives the gradients of eager, where a name of the memory has no
gradient, and where a backward would read what is written to.
"""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend


def written_by_a_detached_name(x, w, d):
    y = F.linear(x, w)
    y.detach().add_(d)
    return F.layer_norm(y, (16,))


def read_by_a_detached_name(x, w, d):
    y = F.linear(x, w)
    a = y.detach()
    y += d
    return F.layer_norm(y, (16,)) * a


def another_name(x, w, d):
    y = F.linear(x, w)
    a = y.view_as(y)
    y += d
    return F.layer_norm(a, (16,)) * y


def a_list_is_written_to(x, w, d):
    y = F.linear(x, w)
    out = y.softmax(-1)
    torch._foreach_mul_([y], 2.0)
    return out * d


def the_weighted_values_are_written_to(x, w, d):
    q, k, v = (t.view(2, -1, 16) for t in (x, w, w.sin()))
    out = torch.bmm((torch.bmm(q, k.mT) * 0.25).softmax(-1), v)
    torch._foreach_mul_([out], 2.0)
    return out.view(8, 16) * d


CODE = [
    written_by_a_detached_name,
    read_by_a_detached_name,
    another_name,
    a_list_is_written_to,
    the_weighted_values_are_written_to,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODE)
def test_gradients_are_those_of_eager(code, dtype, eager_kernels):
    torch.manual_seed(1)
    x, w, d = torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16)
    leaves = [t.requires_grad_() for t in (x.to(dtype), w.to(dtype), d)]

    def gradients(call):
        weights = torch.linspace(-1, 1, 16)
        total = (call(*leaves).float() * weights).sum()
        return torch.autograd.grad(total, leaves, allow_unused=True)

    compiled = torch.compile(code, backend="fusion", options={"fusion.gate": "always"})
    got, want = gradients(compiled), gradients(code)
    far = 1e-4 if dtype == torch.float32 else 0.1
    for ours, eager in zip(got, want, strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager, rtol=0, atol=far * eager.abs().max().item())
    (graph,) = fusion_backend.report().graphs
    assert graph.sites and not graph.error, graph
