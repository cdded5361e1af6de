"""On a GPU: gradients of attention in a process that has computed others of the same sizes, whose
gradients lay otherwise in memory. compat/attention_plans.py says how torch can confuse the two.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.compat.attention_plans import PLANS_CAN_BE_CONFUSED

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


def head_by_head(q, k, v):
    """Its gradient lies in memory head by head, and that of `by_hand` token by token."""
    q, k, v = map(heads, (q, k, v))
    out = torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1) @ v
    return out.flatten(2)


def inductor(fn):
    return torch.compile(fn, dynamic=False)


def fused(fn):
    return torch.compile(fn, backend="fusion", options={"fusion.gate": "always"}, dynamic=False)


def errors(rows, calls):
    """How far the gradients of each call are from its gradients in fp64, in this order."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = 4, rows, HEADS * SIZE
    *given, d = (torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in "qkvd")

    def gradients(call, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        result = call(*leaves)
        return torch.autograd.grad(result, leaves, d.to(dtype).view(result.shape))

    for call, exact in calls:
        pairs = zip(gradients(call, d.dtype), gradients(exact, torch.float64), strict=True)
        yield max(((mine.double() - its).norm() / its.norm()).item() for mine, its in pairs)


INDUCTORS, CALLED = (inductor(by_hand), by_hand), (by_call, by_hand)
OURS, OTHERWISE = (fused(by_hand), by_hand), (fused(head_by_head), head_by_head)


# Lengths that no other test has: the process keeps its plans.
@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (576, [INDUCTORS, OURS]),
        (640, [OURS, INDUCTORS]),
        (704, [CALLED, OURS]),
        (768, [OURS, OTHERWISE]),
        (832, [OTHERWISE, OURS]),
    ],
)
def test_gradients_do_not_depend_on_what_ran_before(rows, calls):
    for error in errors(rows, calls):
        assert error <= 0.02


@pytest.mark.skipif(not PLANS_CAN_BE_CONFUSED, reason="this torch knows its plans")
def test_those_of_torch_do():
    """Without this, ours would need no plan of their own."""
    first, second = errors(896, [INDUCTORS, CALLED])
    assert first <= 0.02 < second
