"""Calls that return their argument, or a view of it, at the edge of what is replaced."""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.testing import collect, fused_nodes

SAME = {
    "contiguous": lambda t: t.contiguous(),
    "type_as": lambda t: t.type_as(t),
    "to": lambda t: t.to(t.dtype),
    "twice": lambda t: t.type_as(t).type_as(t),
    "mixed": lambda t: t.type_as(t).contiguous().to(t.dtype),
    "dropout": lambda t: F.dropout(t, 0.5, training=False),
    "clone": lambda t: t.clone(),
}
same = pytest.mark.parametrize("same", SAME.values(), ids=SAME)


def inside(x, y, same):
    return (same(x + y) * 1.5,)


def both_names(x, y, same):
    t = (x + y) * 1.5
    return same(t) + 1.0, t


def early_name_last(x, y, same):
    t = (x + y) * 1.5
    u = same(t)
    return u.sin(), t.cos(), u, t


def argument(x, y, same):
    t = same(x.sin())
    return (t + y) * 1.5, t


@same
@pytest.mark.parametrize("code", [inside, both_names, early_name_last, argument])
def test_every_name_keeps_its_value(code, same):
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    collector = collect(lambda x, y: code(x, y, same), x, y, dynamic=False)
    assert len(fused_nodes(collector.graphs[0])) == 1, collector.report
    got = torch.compile(lambda x, y: code(x, y, same), backend=collector, dynamic=False)(x, y)
    for g, w in zip(got, code(x, y, same), strict=True):
        torch.testing.assert_close(g, w)
