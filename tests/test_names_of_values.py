"""One value under several names: views that undo each other, copies, and values computed twice."""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.frontends.explain import Collector

from .random_programs import memory


def norm(x):
    return F.layer_norm(x, (16,))


def transposed_twice(x):
    y = norm(x)
    return y, y.t().t()


def indexed(x):
    y = torch.softmax(x, -1)
    return y, y[None][0]


def squeezed_again(x):
    y = torch.softmax(x, -1)
    z = y.unsqueeze(0).squeeze(0)
    return z.t().t(), z


def read_in_between(x):
    y = F.gelu(x)
    z = y.view(2, 4, 16).transpose(0, 1).transpose(0, 1).view(8, 16)
    return y, z, z + y


def twice_of_each(x):
    y = norm(x)
    return y.t().t(), norm(x).t().t(), y


def copied(x):
    y = torch.softmax(x, -1)
    z = y.clone()
    return z.t().t(), z, y


def copied_in_another_order(x):
    y = norm(x)
    return y, y.t().clone().t(), y.t().contiguous().t().contiguous()


def cast(x):
    y = norm(x.double().float()).to(torch.bfloat16)
    return y, y.t().t()


def copied_inside_a_site(x):
    weight, bias = x[0], x[1]
    h = x.t().contiguous().t() * 2 + bias
    z = h.contiguous()
    return h, z, z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


CASES = [
    cast,
    copied_inside_a_site,
    transposed_twice,
    indexed,
    squeezed_again,
    read_in_between,
    twice_of_each,
    copied,
    copied_in_another_order,
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_every_name_is_kept(fn, grad):
    torch._dynamo.reset()
    backend = Collector({"fusion.gate": "always"})
    x = torch.randn(8, 16, requires_grad=grad)
    got, want = torch.compile(fn, backend=backend)(x), fn(x)
    assert backend.report.fused and all(s.fused for s in backend.report.sites if s.counted)
    torch.testing.assert_close(got, want)
    assert memory(got) == memory(want)
    if grad:
        gradients = [
            torch.autograd.grad(sum(v.sin().sum() for v in values), x) for values in (got, want)
        ]
        torch.testing.assert_close(*gradients)
