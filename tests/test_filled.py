"""New memory that is written part by part is the tensor of its parts, and left alone where it is
not.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import explain

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
    x, found = args[0], [t.detach() for t in out]
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
    sites = sum(site.pattern == "rotary" and site.fused for site in graph.sites)
    assert sites == sites_of(fn, grad), graph


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [rotated, halves], ids=lambda fn: fn.__name__)
def test_what_is_written_is_rounded_to_the_memory(fn, grad, eager_kernels):
    """cos and sin are in fp32, and x in bf16."""
    around = normed(fn)
    compiled = torch.compile(around, backend="fusion", options={"fusion.gate": "always"})
    got, want = (value_and_gradient(f, given(torch.bfloat16, grad)) for f in (compiled, around))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


def test_lengths_may_vary():
    x, cos, sin = given()
    for t in (x, cos, sin):
        torch._dynamo.mark_dynamic(t, t.dim() - 3)
    report = explain(rotated, x, cos, sin, options={"fusion.gate": "always"})
    assert [s.pattern for s in report.fused] == ["rotary"], report


def test_the_report_names_the_last_write():
    report = explain(rotated, *given(), options={"fusion.gate": "always"})
    line = rotated.__code__.co_firstlineno + 5
    assert [s.where for s in report.fused] == [f"{__file__}:{line}"]
