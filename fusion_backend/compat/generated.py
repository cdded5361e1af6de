"""The code that Inductor generated, in the modules that hold it, and the calls that run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

from torch._inductor.codecache import PyCodeCache
from torch._inductor.output_code import CompiledFxGraph


def forget_generated() -> None:
    """Graphs compiled from now on get modules of their own, also those that are in a cache."""
    PyCodeCache.cache_clear()


def generated_modules() -> list[ModuleType]:
    """A module for each graph, forward or backward, that was compiled since `forget_generated`."""
    return [module for module in PyCodeCache.modules if hasattr(module, "call")]


@contextlib.contextmanager
def graph_calls_through(wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, a call of any of Inductor's compiled graphs is one of `wrap(call)`: the graph, and
    the list of its inputs.
    """
    with mock.patch.object(CompiledFxGraph, "__call__", wrap(CompiledFxGraph.__call__)):
        yield
