"""Graphs that Inductor compiles beside the compilation that is under way, without any effect on it.

Inductor generates the code of a graph, hands its kernels to processes that compile them, its
workers, and waits for them when it loads the code. A graph that is compiled here need not wait: the
code of other graphs, or that of its own backward, can be generated in the meantime.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator

import sympy
import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._dynamo import compiled_autograd
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.utils import _metrics_context_tls as metrics_of_thread
from torch._dynamo.utils import counters, get_metrics_context
from torch._guards import tracing
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture
from torch._inductor.compile_fx import compile_fx

from fusion_backend.compat.inductor import our_kernels

Waiting = list[tuple[AsyncCompile, dict]]  # who waits for workers, and the names of a module

# Kernels by what was waited for. Two graphs that are generated before either is waited for share
# the kernels of equal source. Inductor would forget how a kernel was tuned if it were loaded twice.
LOADED: weakref.WeakKeyDictionary[CodeCacheFuture, object] = weakref.WeakKeyDictionary()


def begun_apart(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[[], Callable]:
    """Inductor's code of a graph, forward and backward at once, for real inputs. The function that
    is returned waits for Inductor's workers, and returns the compiled graph.

    It has no effect on the compilation that is under way, and goes without that one's tracing
    context and metrics, without caches of graphs, and without CUDA graphs. Triton's cache of
    kernels is used.
    """
    theirs = {"triton.cudagraphs": False, "fx_graph_cache": False, "fx_graph_remote_cache": False}
    theirs["trace.enabled"] = False  # TORCH_COMPILE_DEBUG is about the user's graphs
    theirs["triton.unique_kernel_names"] = False  # equal parts of two graphs are tuned once
    # A backward that is compiled when it first runs would wait for Dynamo's lock, in a thread of
    # autograd's, while this thread holds the lock and waits for the gradient.
    at_once = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    with apart(), extremes_once(), functorch_config.patch(at_once), without_waiting() as waiting:
        compiled = compile_fx(gm, inputs, config_patches=theirs)

    def finished() -> Callable:
        with apart():
            for one, module in waiting:
                load_kernels(one, module)
        return compiled

    return finished


@contextlib.contextmanager
def apart() -> Iterator[None]:
    with tracing(None), metrics_apart(), our_kernels():
        yield


@contextlib.contextmanager
def extremes_once() -> Iterator[None]:
    """Inside, sympy simplifies the minimum or maximum of the same expressions once. Inductor asks
    for few of them again and again, in the indices of the gradient of a pooling.
    """
    base = sympy.Max.__base__  # of Min, too
    simplify = base.__new__
    known = functools.lru_cache(None, typed=True)(simplify)
    base.__new__ = staticmethod(lambda cls, *args, **options: known(cls, *args, **options))
    try:
        yield
    finally:
        base.__new__ = staticmethod(simplify)


@contextlib.contextmanager
def without_waiting() -> Iterator[Waiting]:
    """Inside, a module of generated code that is loaded does not wait for its kernels, but goes to
    the list. Kernels that Inductor runs while it compiles are waited for.
    """
    wait, found = AsyncCompile.wait, []

    def later(self: AsyncCompile, names: dict) -> None:
        if "__file__" in names:
            found.append((self, names))
        else:
            wait(self, names)

    AsyncCompile.wait = later
    try:
        yield found
    finally:
        AsyncCompile.wait = wait


def load_kernels(one: AsyncCompile, names: dict) -> None:
    """Wait for the kernels of a module; those that another module has loaded are taken from it."""
    waited = {name: v for name, v in names.items() if isinstance(v, CodeCacheFuture)}
    names.update({name: LOADED[v] for name, v in waited.items() if v in LOADED})
    one.wait(names)
    LOADED.update({v: names[name] for name, v in waited.items()})


def without_compiled_autograd():
    """Inside, gradients are computed as usual, whatever a user has switched on."""
    return compiled_autograd._disable()


@contextlib.contextmanager
def metrics_apart() -> Iterator[None]:
    """Inside, what a compilation counts is not added to what this process has compiled."""
    own, before = metrics_of_thread, get_metrics_context()
    counted = {name: copy.copy(counter) for name, counter in counters.items()}
    made = {k: copy.copy(v) for k, v in vars(metrics).items() if type(v) in (int, list)}
    own.metrics_context = MetricsContext(on_exit=lambda *results: None)
    try:
        with own.metrics_context:
            yield
    finally:
        own.metrics_context = before
        counters.clear()
        counters.update(counted)
        for name, value in made.items():
            if isinstance(value, list):
                getattr(metrics, name)[:] = value
            else:
                setattr(metrics, name, value)
