"""A gradient that is added to a scattered one is added before the scatter."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend.frontends import dynamo
from fusion_backend.rewrite.scatters import add_before_scatters
from tests.without_interpreter import printed_by

aten = torch.ops.aten
B, N, V = 2, 3, 5
p = torch.rand(B * N, V)
target = torch.tensor([0, 4, 2, 2, 1, 0])[:, None]
at = torch.randn(B * N, 1)
other = torch.randn(B, N, V)


def moved(fn, *inputs, symbolic=False):
    """How many sums are moved. The result stays the same, to the bit."""
    gm = make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    want = gm(*inputs)
    count = add_before_scatters(gm)
    gm.graph.lint()
    torch.testing.assert_close(gm(*inputs), want, rtol=0, atol=0)
    return count


def gradient(p, target, at):
    return (p * 2).scatter(1, target, at).view(B, N, V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_the_sum_is_moved(dtype, first):
    def fn(p, target, at, other):
        d = gradient(p, target, at)
        return aten.add.Tensor(d, other) if first else aten.add.Tensor(other, d)

    inputs = p.to(dtype), target, at.to(dtype), other.to(dtype)
    assert moved(fn, *inputs) == 1


def test_nothing_is_written_between_the_two():
    gm = make_fx(lambda *args: gradient(*args[:3]) + args[3], tracing_mode="fake")(
        p, target, at, other
    )
    add_before_scatters(gm)
    order = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert order.index(aten.scatter.src) > order.index(aten.add.Tensor)
    assert order[order.index(aten.scatter.src) :] == [aten.scatter.src, aten.reshape.default]


def scaled(p, target, at, other):
    return aten.add.Tensor(gradient(p, target, at), other, alpha=2)


def of_a_row(p, target, at, other):
    return gradient(p, target, at) + other[0, 0]


def of_itself(p, target, at, other):
    d = gradient(p, target, at)
    return d + d


def of_another_dtype(p, target, at, other):
    return gradient(p, target, at) + other.double()


def read_before(p, target, at, other):
    d = gradient(p, target, at)
    return d + other, d


def written_into_twice(p, target, at, other):
    base = p * 2
    return base.scatter(1, target, at).view(B, N, V) + other, base


def of_two_a_row(p, target, at, other):
    both, values = torch.cat([target, 4 - target], 1), torch.cat([at, at], 1)
    return (p * 2).scatter(1, both, values).view(B, N, V) + other


def of_some_rows(p, target, at, other):
    return (p * 2).scatter(1, target[:3], at[:3]).view(B, N, V) + other


def along_rows(p, target, at, other):
    return (p * 2).scatter(0, target.T[:, :V], at.T[:, :V]).view(B, N, V) + other


def of_a_number(p, target, at, other):
    return gradient(p, target, at) + 1.0


NEAR_MISSES = [
    scaled, of_a_row, of_itself, of_another_dtype, read_before, written_into_twice, of_two_a_row,
    of_some_rows, along_rows, of_a_number,
]  # fmt: skip


@pytest.mark.parametrize("fn", NEAR_MISSES, ids=lambda fn: fn.__name__)
def test_other_sums_stay(fn):
    assert moved(fn, p, target, at, other) == 0


def test_sums_of_dynamic_sizes_stay():
    def fn(p, target, at, other):
        return (p * 2).scatter(1, target, at) + other

    assert moved(fn, p, target, at, other.view(B * N, V), symbolic=True) == 0


SCRIPT = """
import json, torch, torch.nn.functional as F
from benchmarks.host_runs.without_gpu import cpu_tensors_pass
from fusion_backend.compat.pretended_cuda import code_for_cuda

w = torch.randn(32000, 64, dtype=torch.bfloat16, requires_grad=True)
x, ids = torch.randn(512, 64, dtype=torch.bfloat16), torch.arange(512)

def model(x, w, ids):
    logits = x @ w.t()
    return F.cross_entropy(logits, ids), logits

with cpu_tensors_pass(), code_for_cuda() as codes:
    options = {"fusion.gate": "always"}
    loss, logits = torch.compile(model, backend="fusion", options=options)(x, w, ids)
    (loss + logits.sum()).backward()
print(json.dumps(codes))
"""


def test_the_gradient_of_a_cross_entropy_is_written_once():
    """Of many logits, whose gradient from outside is an argument of the backward. The targets have
    a small kernel of their own.
    """
    _, backward = printed_by(SCRIPT)
    kernels = [line for line in backward.splitlines() if "triton_" in line and ".run(" in line]
    assert sum(f", {512 * 32000}, stream" in line for line in kernels) == 1


def test_a_fault_costs_nothing_else(monkeypatch):
    def fails(gm):
        raise ValueError("made up")

    monkeypatch.setattr(dynamo, "add_before_scatters", fails)
    record = dynamo.GraphRecord(1)
    with pytest.warns(RuntimeWarning, match="scattered gradients stay: ValueError: made up"):
        dynamo.prepare(record, make_fx(lambda x: x * 2)(p))
    assert record.faults and not record.error
