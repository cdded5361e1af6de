"""Compilations without work that nobody needs."""

import gc
import logging
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.repro import after_aot
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._logging import _internal as torch_logging

from fusion_backend import remembered
from fusion_backend.compat import compile_time

OPTIONS = {"fusion.gate": "always"}


def norm(x):
    return F.layer_norm(x.exp(), (8,))


@pytest.fixture
def fresh(monkeypatch):
    """No cache answers, and no structured trace is written."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [])
    with inductor_config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def collections(monkeypatch):
    """The threshold of garbage collections when a graph is fused, and when it is compiled."""
    found = []

    def watch(owner, name):
        inner = getattr(owner, name)

        def watched(*args, **kwargs):
            found.append((name, gc.get_threshold()[0]))
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(remembered, "fuse")
    watch(compile_fx._InProcessFxCompile, "codegen_and_compile")
    return found


def test_garbage_is_rarely_collected_while_a_graph_is_compiled(fresh, collections):
    x, before = torch.randn(4, 8, requires_grad=True), gc.get_threshold()
    y = torch.compile(norm, backend="fusion", options=OPTIONS)(x)
    assert gc.get_threshold() == before
    y.sum().backward()  # whose graph is compiled when it first runs
    assert gc.get_threshold() == before
    names = ["fuse", "codegen_and_compile", "codegen_and_compile"]
    assert collections == [(name, compile_time.RARELY[0]) for name in names]


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (200_000, 10, 10), (700, 10, 0)])
def test_garbage_is_never_collected_more_often_than_before(before):
    usual, inside = gc.get_threshold(), []
    gc.set_threshold(*before)
    try:
        with pytest.raises(ZeroDivisionError), compile_time.hastened():
            with compile_time.hastened():  # as for a region inside of a compilation
                inside.append(gc.get_threshold())
            inside.append(gc.get_threshold())
            raise ZeroDivisionError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
    rarely = tuple(max(pair) for pair in zip(before, compile_time.RARELY, strict=True))
    assert inside == [rarely if before[0] else before] * 2


def test_two_threads_leave_things_as_they_were():
    """The first ends while the second waits; together they would keep what the other has set."""
    before, save, inside, order = gc.get_threshold(), after_aot.save_graph_repro, Event(), []

    def second():
        inside.wait()
        with compile_time.hastened():
            order.append("second")

    thread = Thread(target=second)
    thread.start()
    with compile_time.hastened():
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert gc.get_threshold() == before and after_aot.save_graph_repro is save


@pytest.mark.parametrize("read", [True, False])
def test_a_program_is_written_where_somebody_reads_it(read, fresh, monkeypatch):
    written, save = [], after_aot.save_graph_repro

    def watched(*args, **kwargs):
        written.append(args)
        save(*args, **kwargs)

    monkeypatch.setattr(after_aot, "save_graph_repro", watched)
    if read:
        torch_logging.trace_log.handlers.append(logging.NullHandler())
    torch.compile(norm, backend="fusion", options=OPTIONS)(torch.randn(4, 8))
    assert bool(written) == read
    assert after_aot.save_graph_repro is watched


def test_a_program_that_a_user_asks_for_is_written(fresh):
    gm = torch.fx.symbolic_trace(norm)
    with compile_time.hastened():
        text = after_aot.generate_standalone_repro(gm, [torch.randn(4, 8)])
    assert "class Repro" in text
