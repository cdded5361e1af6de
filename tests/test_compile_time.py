"""Compilations without work that nobody needs."""

import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.repro import after_aot
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._logging import _internal as torch_logging

import fusion_backend  # noqa: F401  it registers the backend
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
def usual():
    """Garbage collections as in a process that has done nothing about them."""
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if count:  # conftest.py has done something
        gc.freeze()


@pytest.fixture
def frozen(monkeypatch):
    """How many objects were passed over whenever Inductor compiled a graph, forward or backward."""
    found, inner = [], compile_fx._InProcessFxCompile.codegen_and_compile

    def watched(self, *args, **kwargs):
        found.append(gc.get_freeze_count())
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(compile_fx._InProcessFxCompile, "codegen_and_compile", watched)
    return found


def test_what_exists_already_is_passed_over_while_a_graph_is_compiled(fresh, usual, frozen):
    x = torch.randn(4, 8, requires_grad=True)
    y = torch.compile(norm, backend="fusion", options=OPTIONS)(x)
    assert gc.get_freeze_count() == 0
    y.sum().backward()  # whose graph is compiled when it first runs
    assert gc.get_freeze_count() == 0
    assert len(frozen) == 2 and min(frozen) > 10_000


def test_after_an_error_collections_are_as_before(usual):
    with pytest.raises(ZeroDivisionError), compile_time.hastened():
        with compile_time.hastened():  # as for a region inside of a compilation
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() > 10_000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_a_process_that_passes_over_objects_by_itself_is_left_alone(usual):
    gc.freeze()
    count = gc.get_freeze_count()
    made = [[] for _ in range(1000)]  # objects that are not passed over
    with compile_time.hastened():
        assert gc.get_freeze_count() == count
    assert gc.get_freeze_count() == count and made
    gc.unfreeze()


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
