"""The pass asks nothing of sizes that is not known already: it adds no guard, replacement or
runtime assertion.

conftest.py holds every test to that. Here are the graphs that once had a guard; a backend that only
counts says how many graphs Dynamo makes without us.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.debugging import aot_eager

from fusion_backend.capture.aliases import aliases_whole
from fusion_backend.compat.torch import fake_mode_of, many_recompiles
from fusion_backend.frontends.explain import Collector
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import arguments

from .sizes import facts
from .test_every_pattern import split, written

ALWAYS = {"fusion.gate": "always"}


def graphs_of(backend, fn, calls, dynamic) -> list:
    """What fn gives in each call, eagerly, having gone through `backend`, a list of what Dynamo
    hands over.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    with many_recompiles():
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
        return [compiled(*given()) for given in calls]


def assert_as_many_graphs(fn, *calls, dynamic=True) -> Collector:
    """As many graphs as Dynamo makes alone, for calls one after the other, each a function that
    makes its inputs.
    """
    seen = []
    plain = graphs_of(lambda gm, _: (seen.append(gm), gm.forward)[1], fn, calls, dynamic)
    collector = Collector(ALWAYS)
    ours = graphs_of(collector, fn, calls, dynamic)
    torch.testing.assert_close(ours, plain)
    assert len(collector.graphs) == len(seen), str(collector.report)
    return collector


def halves(x):
    a, b = x.chunk(2, -1)
    return a.sum() * b.sigmoid().sum()


def rolled(x, n):
    return torch.cat([x[:, n:], x[:, :n]], 1)


def columns(x, w, b, n):
    y = F.linear(x, w, b)
    return y[:, :n].relu(), y[:, n:].sigmoid()


def written_to(x, y):
    z = x.sin()
    z[:, : y.shape[1]] = y
    return z


def narrowed(x, n):
    b = x * 2
    b.narrow(0, 0, n).add_(1.0)
    return F.gelu(b)


def normed(x, n):
    return (
        torch.linalg.vector_norm(x, dim=-1),
        F.normalize(x, dim=-1),
        x[n:].exp(),
        x.narrow(0, n, 2).exp(),
    )


def tensors(*shapes):
    return lambda: [torch.randn(s) if isinstance(s, tuple) else s for s in shapes]


CASES = {
    "halves of an even size, then of an odd one": (
        halves,
        (tensors((4, 8)), tensors((4, 9)), tensors((4, 11))),
    ),
    "rolled by half, then by less": (
        rolled,
        (tensors((4, 8), 4), tensors((4, 10), 3), tensors((5, 9), 4)),
    ),
    "columns of a product": (
        columns,
        (
            tensors((4, 8), (6, 8), (6,), 3),
            tensors((5, 8), (6, 8), (6,), 4),
            tensors((5, 7), (9, 7), (9,), 2),
        ),
    ),
    "half of the columns, then more": (
        written_to,
        (tensors((3, 8), (3, 4)), tensors((3, 8), (3, 5)), tensors((4, 7), (4, 6))),
    ),
    "all rows, then some": (narrowed, (tensors((8, 4), 8), tensors((8, 4), 3), tensors((9, 4), 9))),
    "a factor of one": (
        lambda x, y, f: (torch.add(x, y, alpha=f), torch.rsub(x, y, alpha=f)),
        (tensors((4, 8), (4, 8), 1.0), tensors((4, 8), (4, 8), 2.5)),
    ),
    "a product with factors": (
        lambda a, x, w, n, f: (torch.addmm(a, x, w, beta=n, alpha=f), F.linear(x, w.mT, a)[:, :n]),
        (tensors((8,), (4, 6), (6, 8), 4, 1.0), tensors((8,), (4, 6), (6, 8), 3, 0.5)),
    ),
    "powers": (lambda x, f: x.pow(f), (tensors((4, 8), 2.0), tensors((4, 8), 3.0))),
    "norms and slices": (normed, (tensors((8, 4), 3), tensors((9, 5), 2), tensors((10, 4), 5))),
}


@pytest.mark.parametrize("fn, calls", CASES.values(), ids=CASES)
def test_no_graph_more_than_without_us(fn, calls):
    assert_as_many_graphs(fn, *calls)


def of_rows(x, i):
    """With a number of rows that is read from a tensor."""
    n = i.sum().item()
    torch._check(n >= 2)
    torch._check(n <= x.shape[0])
    yield narrowed(x, n)
    yield torch.cat([x[n:], x[:n]], 0) + x
    yield F.layer_norm(x[:n], x.shape[1:]).relu() + F.gelu(x.narrow(0, 0, n))
    yield F.linear(x, x)[:, :n].softmax(-1)
    yield F.glu(F.pad(x[:n], (0, x.shape[1])), -1)
    yield torch.zeros(n, 4, dtype=x.dtype).add_(1.0) * x.new_ones(n, 1)
    yield torch.add(x, x.pow(n), alpha=n)
    yield F.scaled_dot_product_attention(*[x[None, None, :n]] * 3)


def test_sizes_that_depend_on_data():
    """Nothing is raised out of the pass, and what needs no answer is fused."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        calls = [lambda k=k: [torch.randn(8, 4), torch.tensor([k])] for k in (8, 3)]
        collector = assert_as_many_graphs(lambda x, i: tuple(of_rows(x, i)), *calls)
    assert "gelu" in {s.pattern for s in collector.report.fused}, str(collector.report)


def test_unbacked_sizes_of_the_input():
    def made(rows):
        x = torch.randn(rows, 16)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return lambda: [x]

    def fn(x):
        b = x * 2
        b.narrow(0, 0, x.shape[0]).add_(1.0)
        return F.layer_norm(F.gelu(b), (16,)).chunk(2, -1)

    collector = assert_as_many_graphs(fn, made(8), made(5), dynamic=None)
    assert [s.pattern for s in collector.report.fused] == ["layer_norm", "gelu"], str(
        collector.report
    )


def block(x, w, cos, sin):
    q = F.layer_norm(x, (48,))[:, None] @ w
    turned = q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin
    keep = torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])
    y = F.scaled_dot_product_attention(turned, q, q, keep).transpose(1, 2).flatten(2)
    p = torch.softmax((q @ turned.mT * 0.25).masked_fill(~keep, float("-inf")), -1)
    return F.gelu(y.exp()), p @ q, F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1))


def test_any_batch_length_and_number_of_heads():
    def made(batch, length, heads):
        x, w = torch.randn(batch, length, 48, requires_grad=True), torch.randn(heads, 48, 16)
        cos, sin = torch.randn(length, 1), torch.randn(length, 1)
        for t, dims in ((x, (0, 1)), (w, (0,)), (cos, (0,)), (sin, (0,))):
            torch._dynamo.mark_dynamic(t, dims)
        return lambda: [x, w, cos, sin]

    collector = assert_as_many_graphs(
        block, made(3, 5, 4), made(4, 8, 7), made(5, 6, 3), dynamic=None
    )
    found = {s.pattern for s in collector.report.fused}
    assert {"attention", "rotary", "layer_norm", "gelu", "cross_entropy"} <= found, str(
        collector.report
    )


class Traced(Collector):
    """And has AOTAutograd trace what came out, forward and backward."""

    def __call__(self, gm, example_inputs):
        new = super().__call__(gm, example_inputs).__self__
        out = aot_eager(new, example_inputs)
        self.guards = facts(fake_mode_of(gm).shape_env)["guards"]
        return out


@pytest.mark.parametrize("name", ["dropout_add", "gated_linear"])
def test_what_is_written_asks_no_more_than_what_was_there(name):
    plain, ours = Traced({"fusion.gate": "never"}), Traced(ALWAYS)
    with torch._dynamo.config.patch(specialize_float=True, specialize_int=True):
        for backend in (plain, ours):
            given, call = split(
                arguments(FUSION_RULES[name], written(FUSION_RULES[name])[0], torch.float32)
            )
            graphs_of(
                backend, call(FUSION_RULES[name].reference), [lambda given=given: given], True
            )
    assert [s.pattern for s in ours.report.fused] == [name] and not plain.report.fused
    assert ours.guards == plain.guards


def test_part_of_a_value_is_not_another_name_for_it():
    def held(value):
        node = fx.Graph().placeholder("x")
        node.meta["val"] = value
        return node

    x = torch.empty(8, 8)
    names = {
        "whole": x.view(8, 8),
        "rows": x[:4],
        "later": x[1:].narrow(0, 0, 4),
        "turned": x.t(),
        "kind": x.int(),
    }
    assert [name for name, part in names.items() if aliases_whole(held(part), held(x))] == ["whole"]
    assert not aliases_whole(held(x[1:5]), held(x[:4]))  # as large, elsewhere
