"""In-place code on one of several results of an operator, such as the values of `max`."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.tracer import trace_view
from fusion_backend.capture.view import is_mutation
from fusion_backend.testing import collect

pytestmark = pytest.mark.usefixtures("eager_kernels")


def values_of_max(x):
    top = x.abs().max(-1, keepdim=True).values.clamp_(min=1e-5)
    return x / top


def both_are_read_later(x):
    top, at = x.max(-1)
    doubled = top * 2
    top.clamp_(min=0.5)
    return top, at, doubled


def both_are_written(x):
    top, at = x.max(-1)
    top.mul_(3).add_(1)
    at.add_(1)
    return top + 1, at * 2


def taken_twice(x):
    found = x.sort(-1)
    first = found[0]
    first.mul_(2)
    return found[0] + 1, found[1], first


def whole_and_part(x):
    top, at = x.topk(3, -1)
    part = top[:, :2]
    top.sigmoid_()
    return part, at


def statistics(x):
    var, mean = torch.var_mean(x, -1, keepdim=True)
    var.add_(1e-5).rsqrt_()
    return (x - mean) * var


def views(x):
    y = x.sin()
    a, b = y.split(4, -1)
    a.mul_(2)
    return y, a + b


WHOLE = [values_of_max, both_are_read_later, both_are_written, taken_twice, statistics]
CASES = [*WHOLE, whole_and_part, views]


def one_operator_writes_and_returns_several(x):
    mean, var = torch.zeros(8), torch.ones(8)
    legit = torch.ops.aten._native_batch_norm_legit
    y, *_ = legit(x, None, None, mean, var, True, 0.1, 1e-5)
    return y, mean, var


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_what_is_made_functional(fn):
    view = trace_view(collect(fn, torch.randn(6, 8)).sources[0], None)
    functionalize_locals(view)
    assert any(map(is_mutation, view.graph.nodes)) == (fn not in WHOLE)


@pytest.mark.parametrize(
    "fn", [*CASES, one_operator_writes_and_returns_several], ids=lambda fn: fn.__name__
)
def test_results_are_eagers(fn):
    """Beside a site, so that the graph is written anew."""

    def beside_a_norm(x):
        return fn(x), F.layer_norm(x, (8,))

    torch._dynamo.reset()
    x = torch.randn(6, 8)
    compiled = torch.compile(beside_a_norm, backend="fusion", options={"fusion.gate": "always"})
    torch.testing.assert_close(compiled(x), beside_a_norm(x))
    assert [s.pattern for s in fusion_backend.report().fused] == ["layer_norm"]
    if fn not in (values_of_max, taken_twice, whole_and_part, statistics):
        return  # eager refuses to differentiate them
    own = x.clone().requires_grad_(), x.clone().requires_grad_()
    for run, x in zip((compiled, beside_a_norm), own, strict=True):
        results = torch.utils._pytree.tree_leaves(run(x))
        sum(r.sin().sum() for r in results if r.is_floating_point()).backward()
    torch.testing.assert_close(own[0].grad, own[1].grad)


def test_the_quantisation_of_bitnet_is_found():
    def activations(x):
        scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        return (x * scale).round().clamp_(-128, 127).to(torch.int8), scale

    report = collect(activations, torch.randn(64, 512)).report
    assert [s.pattern for s in report.fused] == ["quantize_per_token"]


def plain(x, w):
    return torch.relu((x @ w) * 2)


def written(x, w):
    y = x @ w
    y[:, 0] = 0
    return torch.softmax(y, -1)


def read_after_a_write(x, w):
    y = x @ w
    y[:, 0] = 0
    return torch.softmax(y * 2, -1)


def read_before_and_after(x, w):
    y = x @ w
    z = torch.relu(y * 2)
    y[:, 0] = 0
    return z + torch.softmax(y * 2, -1)


def a_view_before_and_after(x, w):
    y = x @ w
    z = torch.relu(y.view(2, -1) * 2)
    y.t()[0] = 0
    return z.view(8, -1) + torch.softmax(y.view(2, -1) * 2, -1).view(8, -1)


AT_TWO_TIMES = [
    (plain, read_after_a_write),
    (read_after_a_write, plain),
    (lambda x, w: torch.relu(x @ w), written),
    (written, lambda x, w: torch.relu(x @ w)),
    (written, lambda x, w: torch.softmax(x @ w, -1)),
    (read_before_and_after,),
    (a_view_before_and_after,),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("parts", AT_TWO_TIMES)
def test_values_that_are_computed_alike_but_before_and_after_a_write(grad, parts):
    def every(x, w):
        return [part(x, w) for part in parts]

    x, w = torch.randn(8, 16, requires_grad=grad), torch.randn(16, 16, requires_grad=grad)
    fused = torch.compile(every, backend="fusion", options={"fusion.gate": "always"})
    for got, want in zip(fused(x, w), every(x, w), strict=True):
        torch.testing.assert_close(got, want)


def test_a_view_of_what_reads_written_memory_is_the_value_itself():
    def fn(x, w, residual):
        y = x @ w
        y[:, 0] = 0
        h = residual + y
        return h * torch.rsqrt(h.view(h.shape).pow(2).mean(-1, keepdim=True) + 1e-6)

    inputs = [torch.randn(8, 16), torch.randn(16, 16), torch.randn(8, 16)]
    report = collect(fn, *inputs).report
    assert [s.pattern for s in report.fused] == ["rms_norm"]


def into_an_operand(x, w, residual, g, h):
    y = x @ w
    torch.add(y, residual, out=y)
    z = y * 3
    return F.layer_norm(y, (16,), g, h), z


def into_new_memory(x, w, residual, g, h):
    y = torch.empty_like(residual)
    torch.add(x @ w, residual, out=y)
    z = y * 3
    return F.layer_norm(y, (16,), g, h), z


def into_an_argument(x, w, residual, g, h):
    torch.add(x @ w, residual, out=residual)
    z = residual * 3
    return F.layer_norm(residual, (16,), g, h), z


@pytest.mark.parametrize("fn", [into_an_operand, into_new_memory, into_an_argument])
def test_a_result_that_is_written_to_memory_which_others_read(fn):
    x, w, residual, g, h = map(torch.randn, [(8, 16), (16, 16), (8, 16), (16,), (16,)])
    fused = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    ours, theirs = residual.clone(), residual.clone()
    for got, want in zip(fused(x, w, ours, g, h), fn(x, w, theirs, g, h), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)
    report = fusion_backend.report()
    assert not [g.error for g in report.graphs if g.error]


def written_behind(x, weight, body):
    y = x * 2
    z = checkpoint(lambda: body(y), use_reentrant=False)
    y.relu_()
    return F.rms_norm(y, (16,), weight), z


def read_before_and_behind(x, weight, body):
    y = x * 2
    z = checkpoint(lambda: body(y), use_reentrant=False).view(8, 16)
    squares = z.pow(2).mean(-1, keepdim=True)
    y.relu_()
    return z * torch.rsqrt(squares + 1e-6) * weight


@pytest.mark.parametrize("body", [torch.Tensor.float, lambda y: y.view(4, 32)])
@pytest.mark.parametrize("fn", [written_behind, read_before_and_behind])
def test_a_checkpoint_that_returns_its_argument(fn, body):
    """Its result is the memory that is then written to, though it has a storage of its own."""
    x, weight = torch.randn(8, 16), torch.randn(16)
    fused = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    for got, want in zip(fused(x, weight, body), fn(x, weight, body), strict=True):
        torch.testing.assert_close(got, want)


def test_a_checkpoint_that_returns_new_memory():
    """What it has read may be written to in a site behind it."""

    def fn(x, w, b):
        y = x @ w
        z = checkpoint(torch.sin, y, use_reentrant=False)
        y += b
        return F.gelu(y), z

    report = collect(fn, torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)).report
    assert [s.pattern for s in report.fused] == ["bias_act"]
