"""Compilations without work that nobody needs."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.repro import after_aot
from torch._inductor import compile_fx
from torch._logging import _internal as logging

# How many objects are made between two garbage collections of the youngest objects, and how many
# collections of a generation there are between two of the next.
RARELY = 100_000, 50, 1000


@contextlib.contextmanager
def hastened() -> Iterator[None]:
    """Inside, garbage is rarely collected, and Inductor writes no program for a trace that nobody
    reads. Only one thread at a time is inside, so that each finds things as they were before.
    """
    with compile_lock, collecting_rarely(), without_unread_programs():
        yield


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, garbage is collected rarely. A compilation makes millions of objects and keeps them,
    and by default Python looks through all of them again and again. A process that does not collect
    garbage still does not, and none collects more often than before.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, RARELY))
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
