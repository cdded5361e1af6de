"""New memory that is written part by part is the tensor of its parts, and left alone where it is
not.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import explain
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.tracer import capture
from fusion_backend.compat.torch import FakeTensorMode

D = 16


def parts(x):
    return x.unflatten(-1, (-1, 2)).unbind(-1)


def rotated(x, cos, sin, memory=torch.empty_like):
    """As in Wan: interleaved, into new memory."""
    a, b = parts(x)
    out = memory(x)
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = a * sin + b * cos
    return out.type_as(x)


def the_other_part_first(x, cos, sin):
    a, b = parts(x)
    out = torch.empty_like(x)
    out[..., 1::2] = a * sin + b * cos
    out[..., 0::2] = a * cos - b * sin
    return out


def zeros(x, cos, sin):
    return rotated(x, cos, sin, torch.zeros_like)


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    out = x.new_empty(x.shape)
    out[..., : D // 2] = a * cos - b * sin
    out[..., D // 2 :] = b * cos + a * sin
    return out


def in_a_checkpoint(x, cos, sin):
    return checkpoint(rotated, x, cos, sin, use_reentrant=False)


def two(x, cos, sin):
    return rotated(x, cos, sin) + halves(x, cos, sin)


def read_by_a_view(x, cos, sin):
    return rotated(x, cos, sin).flatten(2).sin()


def written_to_afterwards(x, cos, sin):
    y = rotated(x, cos, sin)
    y.mul_(2.0)
    return y


def parts_that_change_afterwards(x, cos, sin):
    a, b = parts(x)
    low, high = a * cos - b * sin, a * sin + b * cos
    out = torch.empty_like(x)
    out[..., 0::2] = low
    out[..., 1::2] = high
    return out, low.add_(1.0)


def by_copy(x, cos, sin):
    a, b = parts(x)
    out = torch.empty_like(x)
    out[..., 0::2].copy_(a * cos - b * sin)
    out[..., 1::2].copy_(a * sin + b * cos)
    return out


ROTARY = [rotated, the_other_part_first, zeros, halves, by_copy, in_a_checkpoint, read_by_a_view]


def one_part_is_missing(x, cos, sin):
    out = torch.zeros_like(x)
    out[..., 0::2] = parts(x)[0] * cos
    return out


def one_element_is_missing(x, cos, sin):
    a, b = x[..., 1:].chunk(2, -1)
    out = torch.zeros_like(x)
    out[..., : D // 2] = F.pad(a, (0, D // 2 - a.shape[-1]))
    out[..., D // 2 + 1 :] = b[..., -(D // 2 - 1) :]
    return out


def one_element_twice(x, cos, sin):
    """And another not at all."""
    a, b = parts(x)
    out = torch.zeros_like(x)
    out[..., : D // 2] = a * 2
    out[..., D // 2 - 1 : D - 1] = b * 3
    return out


def every_third_element(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    out[..., 0::3] = a[..., :6] * 2
    out[..., 1::3] = b[..., :5] * 3
    return out


def another_dimension(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    out[..., 0::2] = a * cos
    out[:, :, 1::2] = x[:, :, 1::2] * 2
    return out


def read_in_between(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    out[..., 0::2] = a * cos - b * sin
    seen = out.sum()
    out[..., 1::2] = a * sin + b * cos
    return out * seen


def from_itself(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = out[..., 0::2] * 2
    return out


def an_older_name(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    flat = out.view(-1)
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = a * sin + b * cos
    return out, flat * 2


def a_name_of_a_part(x, cos, sin):
    a, b = parts(x)
    out = torch.zeros_like(x)
    even = out[..., 0::2]
    even.copy_(a * cos - b * sin)
    out[..., 1::2] = a * sin + b * cos
    return out, even * 2


def a_part_changes_in_between(x, cos, sin):
    a, b = parts(x)
    low, high = a * cos - b * sin, a * sin + b * cos
    out = torch.zeros_like(x)
    out[..., 0::2] = low
    low.add_(1.0)
    out[..., 1::2] = high
    return out, low


def an_argument_changes_in_between(x, cos, sin):
    y = x.detach()
    out = torch.zeros_like(x)
    out[..., 0::2] = y[..., : D // 2]
    y.add_(1.0)
    out[..., 1::2] = y[..., D // 2 :]
    return out, x * 2


def another_name_of_older_memory(x, cos, sin):
    held = x.detach() * 2.0
    y, out = torch.einsum("abcd->abcd", held), held * 3.0
    y[..., 0::2] = out[..., : D // 2]
    y[..., 1::2] = out[..., D // 2 :]
    return y, held + x


def a_checkpoint_returns_a_part(x, cos, sin):
    a, b = parts(x)
    low, high = a * cos - b * sin, a * sin + b * cos
    out = torch.zeros_like(x)
    out[..., 0::2] = checkpoint(torch.Tensor.float, low, use_reentrant=False)
    low.add_(1.0)
    out[..., 1::2] = high
    return out


def a_part_is_filled_later(x, cos, sin):
    a, b = parts(x)
    part, out = torch.zeros_like(x), x.new_empty((*x.shape[:-1], 2 * D))
    out[..., :D] = part
    out[..., D:] = x
    part[..., 0::2] = a * cos - b * sin
    part[..., 1::2] = a * sin + b * cos
    return out, part


def a_number(x, cos, sin):
    out = torch.zeros_like(x)
    out[..., 0::2] = parts(x)[0] * cos
    out[..., 1::2] = 1.0
    return out


def a_row(x, cos, sin):
    out = torch.zeros_like(x)
    out[..., 0::2] = parts(x)[0] * cos
    out[..., 1::2].copy_(cos[0])
    return out


def an_argument(x, cos, sin):
    a, b = parts(x)
    low, high = a * cos - b * sin, a * sin + b * cos
    cos = cos.expand(x.shape[:-1] + cos.shape[-1:]).contiguous()
    out = torch.cat((cos, cos), -1).detach()
    held = out.view(out.shape)
    out[..., 0::2] = low
    out[..., 1::2] = high
    return held


def other_strides(x, cos, sin):
    return rotated(x.transpose(1, 2), cos[:, 0], sin[:, 0])


def without_gradient(x, cos, sin):
    a, b = parts(x)
    low, high = a * cos - b * sin, a * sin + b * cos
    out = torch.zeros_like(x)
    with torch.no_grad():
        out[..., 0::2] = low
    out[..., 1::2] = high
    return out


def memory_with_a_gradient(x, cos, sin):
    a, b = parts(x.detach())
    out = x * 2
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = a * sin + b * cos
    return out


OTHERS = [
    two,
    written_to_afterwards,
    parts_that_change_afterwards,
    one_part_is_missing,
    one_element_is_missing,
    one_element_twice,
    every_third_element,
    another_dimension,
    read_in_between,
    from_itself,
    an_older_name,
    a_name_of_a_part,
    a_part_changes_in_between,
    an_argument_changes_in_between,
    another_name_of_older_memory,
    a_checkpoint_returns_a_part,
    a_part_is_filled_later,
    a_number,
    a_row,
    an_argument,
    other_strides,
    without_gradient,
    memory_with_a_gradient,
]


def sites_of(fn, grad: bool) -> int:
    if fn is memory_with_a_gradient:
        return not grad
    return 2 if fn is two else fn in ROTARY


def given(dtype=torch.float32, grad=False):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, D).to(dtype).requires_grad_(grad)
    cos, sin = torch.randn(2, 8, 1, D // 2)
    return x, cos, sin


def normed(fn):
    """A site reads the memory, so that the writes are written again."""

    def run(x, cos, sin):
        out = fn(x, cos, sin)
        first, *rest = out if isinstance(out, tuple) else (out,)
        return F.layer_norm(first, (first.shape[-1],)), *rest

    return run


def value_and_gradient(fn, args):
    out = [t.clone() for t in fn(*args)]
    x = args[0]
    found = [x.detach(), *(t.detach() for t in out)]
    if x.requires_grad:
        weights = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in out]
        total = sum((t.float() * w).sum() for t, w in zip(out, weights, strict=True))
        found += torch.autograd.grad(total, x, allow_unused=True)
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [*ROTARY, *OTHERS], ids=lambda fn: fn.__name__)
def test_the_results_are_those_of_eager(fn, grad, eager_kernels):
    around = normed(fn) if fn in OTHERS else lambda *args: (fn(*args),)
    compiled = torch.compile(around, backend="fusion", options={"fusion.gate": "always"})
    for _ in range(2):
        got, want = (value_and_gradient(f, given(grad=grad)) for f in (compiled, around))
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            if w is not None:
                torch.testing.assert_close(g, w)
                assert g.stride() == w.stride()
    (graph,) = fusion_backend.report().graphs
    assert not graph.error and not graph.faults, graph
    fused = [site.pattern for site in graph.sites if site.fused]
    assert fused.count("rotary") == sites_of(fn, grad), graph
    assert fused.count("layer_norm") == (fn in OTHERS and fn is not other_strides), graph


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [rotated, halves], ids=lambda fn: fn.__name__)
def test_what_is_written_is_rounded_to_the_memory(fn, grad, eager_kernels):
    """cos and sin are in fp32, and x in bf16."""
    around = normed(fn)
    compiled = torch.compile(around, backend="fusion", options={"fusion.gate": "always"})
    got, want = (value_and_gradient(f, given(torch.bfloat16, grad)) for f in (compiled, around))
    (graph,) = fusion_backend.report().graphs
    assert not graph.error and "rotary" in [s.pattern for s in graph.sites if s.fused], graph
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


def test_lengths_may_vary():
    x, cos, sin = given()
    for t in (x, cos, sin):
        torch._dynamo.mark_dynamic(t, t.dim() - 3)
    report = explain(rotated, x, cos, sin, options={"fusion.gate": "always"})
    assert [s.pattern for s in report.fused] == ["rotary"], report


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast(half, eager_kernels):
    """Which joins no tensors of the other half precision."""

    def fn(*args):
        with torch.autocast("cpu", half):
            return normed(rotated)(*args)

    compiled = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    got, want = (value_and_gradient(f, given(torch.bfloat16, True)) for f in (compiled, fn))
    (graph,) = fusion_backend.report().graphs
    fused = [s.pattern for s in graph.sites if s.fused]
    assert not graph.error and fused.count("rotary") == (half == torch.bfloat16), graph
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


def explicit_ends(x):
    out = torch.empty_like(x)
    out[..., : D // 2] = x[..., : D // 2].sin()
    out[..., D // 2 : D] = x[..., D // 2 : D].cos()
    return F.layer_norm(out, (out.shape[-1],))


def test_no_size_is_assumed():
    """That the parts are the whole is known of one number of columns alone."""
    x = torch.randn(2, 8, D)
    torch._dynamo.mark_dynamic(x, 2)
    (graph,) = explain(explicit_ends, x, options={"fusion.gate": "always"}).graphs
    assert not graph.error


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("meta", "cpu"), ("cpu", "meta")])
def test_memory_of_another_device(devices):
    def fn(x, a):
        out = torch.empty_like(x)
        out[..., 0::2].copy_(a)
        out[..., 1::2].copy_(a)
        return out

    with FakeTensorMode():
        inputs = [torch.empty(2, n, device=d) for n, d in zip((D, D // 2), devices, strict=True)]
        gm = torch.fx.symbolic_trace(fn)
        Examples(gm).run(*inputs)
    view = capture(gm)
    assert bool(functionalize_locals(view)) == (devices == ("cpu", "cpu"))


class Examples(torch.fx.Interpreter):
    def run_node(self, n):
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def test_the_report_names_the_last_write():
    report = explain(rotated, *given(), options={"fusion.gate": "always"})
    line = rotated.__code__.co_firstlineno + 5
    assert [s.where for s in report.fused] == [f"{__file__}:{line}"]
