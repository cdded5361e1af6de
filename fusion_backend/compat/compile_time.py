"""Compilations without work that nobody needs."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from torch._dynamo.repro import after_aot
from torch._inductor import compile_fx
from torch._logging import _internal as logging


@contextlib.contextmanager
def hastened() -> Iterator[None]:
    """Inside, garbage collections pass over all objects that exist already, and Inductor writes no
    program for a trace that nobody reads.
    """
    with older_objects_passed_over(), without_unread_programs():
        yield


@contextlib.contextmanager
def older_objects_passed_over() -> Iterator[None]:
    """Inside, no garbage collection looks at the objects that exist already, of which a model and
    its graphs have millions: a compilation makes objects so fast that all would be looked at again
    and again. A process that has objects passed over by itself (gc.freeze) is left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def without_unread_programs() -> Iterator[None]:
    """Inside, Inductor does not write a graph as a program that can be run (`fx_graph_runnable`)
    unless structured traces are written. To do so it parses the source of each Triton kernel. From
    torch 2.14 on it asks by itself whether anybody reads the program.
    """
    save = after_aot.save_graph_repro

    def save_if_read(*args, **kwargs) -> None:
        by_inductor = sys._getframe(1).f_globals is vars(compile_fx)
        if not by_inductor or logging.trace_log.handlers:
            save(*args, **kwargs)

    after_aot.save_graph_repro = save_if_read
    try:
        yield
    finally:
        after_aot.save_graph_repro = save
