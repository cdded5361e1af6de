"""The kernels that an op's functions can launch, found in their code.

Inductor takes a graph from its cache without running these functions. Our kernels in it get the
faster of Inductor's launchers only if Inductor knows them by then.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from fusion_backend.compat.inductor import ANALYSED
from fusion_backend.compat.triton import Autotuner, Heuristics, InterpretedFunction, JITFunction

Kernel: TypeAlias = JITFunction | InterpretedFunction


def make_known(functions: Iterable[Callable[..., Any] | None]) -> None:
    """Tell Inductor of the kernels that these functions launch."""
    for kernel in kernels_of(functions):
        if isinstance(kernel, JITFunction):
            ANALYSED.setdefault(kernel, {})


def kernels_of(functions: Iterable[Callable[..., Any] | None]) -> set[Kernel]:
    """The kernels that functions name; those that are named by functions that they name count too,
    of this package or of the same module.
    """
    found: set[Kernel] = set()
    seen: set[object] = set()
    given = [fn for fn in functions if fn is not None]
    pending: list[object] = [*given]
    near = {fn.__module__ for fn in given}
    while pending:
        value = pending.pop()
        while isinstance(value, (Autotuner, Heuristics)):
            value = value.fn
        if isinstance(value, Kernel):
            found.add(value)
        elif isinstance(value, types.FunctionType) and value not in seen:
            seen.add(value)
            if value.__module__ in near or (value.__module__ or "").startswith("fusion_backend."):
                pending += named_in(value, value.__code__)
    return found


def named_in(fn: types.FunctionType, code: types.CodeType) -> Iterator[object]:
    """What the code of a function names: its globals, attributes of modules, and its closure."""
    names = dict.fromkeys(code.co_names)
    for name in names:
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            yield from (vars(value).get(attribute) for attribute in names)
        yield value
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    for name in code.co_freevars:
        with contextlib.suppress(KeyError, ValueError):  # a name that is bound later
            yield cells[name].cell_contents
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from named_in(fn, inner)
