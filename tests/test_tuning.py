"""The kernels of our graphs are tuned by their device time; those of others as ever."""

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fusion_backend.compat import tuning
from fusion_backend.compat.torch import benchmarker

# What Inductor's own timer raises where there is no GPU, in one version or another.
NO_GPU = (RuntimeError, AssertionError, AttributeError)


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
    return Tuner()


def compiled_inside(tuner) -> None:
    with tuning.tuned_by_device_time(), pytest.raises(Exception):  # noqa: B017, PT011
        CachingAutotuner._precompile_worker(tuner)  # it has no source


def test_kernels_that_are_compiled_inside(tuner):
    compiled_inside(tuner)
    assert tuner in tuning.OURS
    assert list(tuner.benchmark_all_configs().values()) == [2.0, 1.0]
    assert not tuning.TUNING.get()


def test_other_kernels_are_timed_by_inductor(tuner, monkeypatch):
    assert tuner not in tuning.OURS
    with pytest.raises(NO_GPU):
        tuner.benchmark_all_configs()


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
    with pytest.raises(NO_GPU) as raised:
        tuner.benchmark_all_configs()
    assert not isinstance(raised.value, torch.OutOfMemoryError)
