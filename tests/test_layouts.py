"""Results of ops that lie in memory otherwise than the graph's own are copied where a reader sees
it. tests/test_gate_on_cuda.py has what the gate says of such a copy.
"""

import pytest
import torch

from fusion_backend.decide.call import order_in_memory
from fusion_backend.testing import fused_nodes, rewritten
from tests.kernel_checks import randn, symbolic
from tests.spelled import check_spelling, leaves

EMPTY = torch.empty(2, 3, 4, 5)
ORDERS = {
    "contiguous": (EMPTY, [0, 1, 2, 3]),
    "permuted": (EMPTY.permute(2, 0, 3, 1), [1, 3, 0, 2]),
    "channels last": (EMPTY.to(memory_format=torch.channels_last), [0, 2, 3, 1]),
    "one number": (torch.empty(()), []),
    "with gaps": (EMPTY[..., ::2].mT, None),
    "expanded": (torch.empty(3, 1).expand(3, 4), None),
    "overlapping": (torch.empty(9).as_strided((3, 3), (1, 2)), None),
}


@pytest.mark.parametrize("t, order", ORDERS.values(), ids=ORDERS)
def test_the_order_in_memory(t, order):
    assert order_in_memory(t) == order
    if order is not None:
        assert t.permute(order).is_contiguous()


def test_an_order_of_symbols_is_unknown_and_adds_no_guard():
    env, (x,) = symbolic(randn(3, 4, 5))
    before = len(env.guards)
    with x.fake_mode:
        assert order_in_memory(x.permute(1, 0, 2)) is None and len(env.guards) == before


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def root_first(x, w, cos, sin):
    """The product is laid out as its first operand, the root, and not as x is."""
    h = x.transpose(1, 2)
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)
    n = (w * (root * h)).transpose(1, 2)
    return n * cos + rotate_half(n) * sin


def test_a_copy_has_the_strides_of_the_graph():
    inputs = leaves((2, 3, 5, 8), (8,), (5, 8), (5, 8))
    node = check_spelling("norm_rotary", root_first, *inputs)
    (permuted,) = node.users if "getitem" not in str(*node.users) else [*node.users][0].users
    assert "permute" in str(permuted.target)
    gm = rewritten(root_first, *inputs)
    assert gm(*inputs)[0].stride() == root_first(*inputs).stride() == (120, 8, 24, 1)


def test_a_copy_in_an_order_that_is_not_its_own_inverse():
    """By hand the norm lies in memory as x does; the op gives contiguous rows."""

    def fn(x, w):
        h = x.permute(1, 2, 0, 3)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * w

    inputs = leaves((2, 3, 5, 8), (8,))
    check_spelling("rms_norm", fn, *inputs)
    (got,), want = rewritten(fn, *inputs)(*inputs), fn(*inputs)
    assert got.stride() == want.stride() == (40, 8, 120, 1)
    torch.testing.assert_close(got, want)


def test_no_copy_where_nobody_sees_the_strides():
    def contiguous(x, w, cos, sin):
        return root_first(x, w, cos, sin).contiguous() * 2

    inputs = leaves((2, 3, 5, 8), (8,), (5, 8), (5, 8), needs=False)
    gm = rewritten(contiguous, *inputs)
    assert fused_nodes(gm) and not any("clone" in str(n.target) for n in gm.graph.nodes)
    torch.testing.assert_close(gm(*inputs)[0], contiguous(*inputs))
