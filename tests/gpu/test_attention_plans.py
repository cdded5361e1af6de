"""On a GPU: gradients of attention in a process that has computed others of the same sizes, whose
results lay otherwise in memory. torch keeps plans of cuDNN by sizes, strides and scale of q, k, v.
"""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE = 2, 64


def heads(t):
    return t.view(*t.shape[:2], HEADS, SIZE).transpose(1, 2)


def by_hand(q, k, v):
    q, k, v = map(heads, (q, k, v))
    out = torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1) @ v
    return out.permute(0, 2, 1, 3).flatten(2)


def by_call(q, k, v):
    out = F.scaled_dot_product_attention(*map(heads, (q, k, v)))
    return out.permute(0, 2, 1, 3).flatten(2)


def inductor(fn):
    return torch.compile(fn, dynamic=False)


def fused(fn):
    return torch.compile(fn, backend="fusion", options={"fusion.gate": "always"}, dynamic=False)


# Lengths that no other test has: the process keeps its plans.
ORDERS = {
    "behind Inductor's own replacement": (512 + 64, [inductor(by_hand), fused(by_hand)]),
    "behind eager code": (512 + 128, [by_call, fused(by_hand)]),
    "in front of both": (512 + 192, [fused(by_hand), by_call]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_does_not_depend_on_what_ran_before(order):
    rows, calls = ORDERS[order]
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = 4, rows, HEADS * SIZE
    tensors = [torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in "qkvd"]
    *given, d = tensors
    exact = [t.double().requires_grad_() for t in given]
    want = torch.autograd.grad(by_hand(*exact), exact, d.double())
    for call in calls:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        got = torch.autograd.grad(call(*leaves), leaves, d)
        for mine, its in zip(got, want, strict=True):
            assert (mine.double() - its).norm() <= 0.02 * its.norm(), call
