"""Graphs that are compiled beside a compilation, without waiting for each other's kernels."""

import pytest
import sympy
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend.compat import apart


def traced(fn, *inputs):
    return make_fx(fn, tracing_mode="fake")(*inputs)


@pytest.fixture
def waits(monkeypatch):
    """The number of kernels that were there whenever somebody had waited."""
    found, wait = [], AsyncCompile.wait

    def watched(self, names):
        wait(self, names)
        found.append(sum(callable(v) for k, v in names.items() if "fused" in k))

    monkeypatch.setattr(AsyncCompile, "wait", watched)
    return found


@config.patch(compile_threads=2, force_disable_caches=True)
def test_a_graph_is_waited_for_when_it_is_needed(waits):
    x, w = torch.randn(8, 16), torch.randn(16, requires_grad=True)
    begun = apart.begun_apart(traced(lambda x, w: (torch.sin(x * w).cos(),), x, w), [x, w])
    other = apart.begun_apart(traced(lambda x, w: (torch.exp(x + w),), x, w), [x, w])
    assert waits == []
    (got,) = begun()(x, w)
    assert len(waits) == 2 and all(waits)  # forward and backward
    torch.testing.assert_close(got, torch.sin(x * w).cos())
    (gradient,) = torch.autograd.grad(got.sum(), [w])
    (wanted,) = torch.autograd.grad(torch.sin(x * w).cos().sum(), [w])
    torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(other()(x, w)[0], torch.exp(x + w))
    assert len(waits) == 4


@config.patch(compile_threads=2)
def test_equal_kernels_are_loaded_once():
    """A kernel that is loaded twice would be tuned twice."""
    times = []

    class Future(apart.CodeCacheFuture):
        def result(self, timeout=None):
            times.append(self)
            return "kernel"

    shared, own = Future(), Future()
    first, second = {"a": shared, "x": 1}, {"b": shared, "c": own}
    apart.load_kernels(AsyncCompile(), first)
    apart.load_kernels(AsyncCompile(), second)
    assert first == {"a": "kernel", "x": 1} and second == {"b": "kernel", "c": "kernel"}
    assert times == [shared, own]


def test_an_extreme_is_simplified_once(monkeypatch):
    asked, base = [], sympy.Max.__base__
    before, filtered = base.__dict__["__new__"], base._new_args_filter.__func__
    monkeypatch.setattr(
        base, "_new_args_filter", classmethod(lambda cls, x: asked.append(cls) or filtered(cls, x))
    )
    a, b = sympy.symbols("a b", positive=True)
    expected = sympy.Max(a, a + b, 3), sympy.Min(a, a + b, 3), sympy.Max(1, 2)
    asked.clear()
    for _ in range(2):
        with apart.extremes_once():
            for _ in range(3):
                assert (sympy.Max(a, a + b, 3), sympy.Min(a, a + b, 3), sympy.Max(1, 2)) == expected
    assert len(asked) == 6  # nothing is known from one to the next
    assert base.__dict__["__new__"].__func__ is before.__func__


def test_what_inductor_runs_while_it_compiles_is_waited_for(waits):
    with apart.without_waiting() as found:
        AsyncCompile().wait({})
        AsyncCompile().wait({"__file__": "module.py"})
    assert len(waits) == len(found) == 1
