"""The kernels of our graphs are tuned by their device time; those of others as ever."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fusion_backend.compat import tuning
from fusion_backend.compat.torch import benchmarker


class Compiled:
    kernel = SimpleNamespace(hash="0" * 64)


class Launcher(str):
    config = None


class Tuner(CachingAutotuner):
    """A kernel with two configurations; it is told how long they take."""

    def __init__(self):
        self.launchers, self.inductor_meta = [Launcher("slow"), Launcher("fast")], {}
        self.compile_id = self.is_backward = self.fn = None
        self.coordesc_tuner = self
        self.compile_results = []

    def bench(self, launcher, *args, **kwargs):
        return benchmarker.benchmark_gpu(lambda: launcher)

    def reset_to_zero_args(self, *args, **kwargs):
        pass

    def cache_benchmark_result(self, *args):
        pass


@pytest.fixture
def tuner(monkeypatch):
    tuning.install()
    monkeypatch.setattr(tuning, "milliseconds", lambda call: {"slow": 2.0, "fast": 1.0}[call()])
    monkeypatch.setitem(tuning.BEFORE, "benchmark_gpu", lambda call: 7.0)
    return Tuner()


def compiled_inside(tuner) -> None:
    """Its kernels came from another process, so that there is nothing to compile."""
    tuner.compile_results, tuner.triton_meta = [Compiled()], {}
    with tuning.tuned_by_device_time():
        CachingAutotuner._precompile_worker(tuner)


def test_kernels_that_are_compiled_inside(tuner):
    compiled_inside(tuner)
    assert tuner in tuning.OURS
    assert list(tuner.benchmark_all_configs().values()) == [2.0, 1.0]
    assert not tuning.TUNING.get()


def test_other_kernels_are_timed_by_inductor(tuner):
    assert tuner not in tuning.OURS
    assert set(tuner.benchmark_all_configs().values()) == {7.0}


def test_what_is_compiled_outside_is_not_ours(tuner):
    before = CachingAutotuner._precompile_worker
    with tuning.tuned_by_device_time():
        assert CachingAutotuner._precompile_worker is not before
    assert CachingAutotuner._precompile_worker is before


def test_without_memory_inductors_timer_runs(tuner, monkeypatch):
    def full(call):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tuning, "milliseconds", full)
    compiled_inside(tuner)
    assert set(tuner.benchmark_all_configs().values()) == {7.0}
