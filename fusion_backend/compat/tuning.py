"""Lets Inductor choose the configurations of the kernels in our graphs by their device time alone.

When a kernel first runs, Inductor times its configurations and keeps the fastest. It starts each
timed launch on an idle GPU, so that for a kernel shorter than the launch it times the host. In our
graphs, and in the regions that are measured, each timed launch waits behind other work.

The kernels of other graphs are tuned as without this package, unless they are the same kernels:
Inductor keeps its choice on disk, by the source of a kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import statistics
import weakref
from collections.abc import Callable, Iterator

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fusion_backend.compat.torch import benchmarker

FLUSH = 128 << 20  # bytes that are written and read in front of a launch; more than any L2
WORK = (2, 64)  # how often: at first, and at most
SAMPLES, LONG_MS = (9, 3), 2.0  # fewer of a launch that takes longer

BEFORE: dict[str, Callable] = {}  # what `install` replaced, by name
OURS: weakref.WeakSet[CachingAutotuner] = weakref.WeakSet()
TUNING: contextvars.ContextVar[bool] = contextvars.ContextVar("tuning", default=False)


@contextlib.contextmanager
def tuned_by_device_time() -> Iterator[None]:
    """The configurations of the kernels that are compiled inside will be timed by `milliseconds`,
    when they first run.
    """
    install()
    precompile = CachingAutotuner._precompile_worker

    def precompiled(tuner: CachingAutotuner) -> None:
        OURS.add(tuner)
        precompile(tuner)

    CachingAutotuner._precompile_worker = precompiled
    try:
        yield
    finally:
        CachingAutotuner._precompile_worker = precompile


@functools.cache
def install() -> None:
    """Once in a process; only the kernels in OURS see a difference."""
    all_configs = CachingAutotuner.benchmark_all_configs
    BEFORE["benchmark_gpu"] = benchmarker.benchmark_gpu

    @functools.wraps(all_configs)
    def benchmark_all_configs(tuner: CachingAutotuner, *args, **kwargs):
        token = TUNING.set(tuner in OURS)
        try:
            return all_configs(tuner, *args, **kwargs)
        finally:
            TUNING.reset(token)

    @functools.wraps(benchmarker.benchmark_gpu)
    def timed(call: Callable[[], object], *args, **kwargs):
        if TUNING.get():
            try:
                return milliseconds(call)
            except torch.OutOfMemoryError:  # Inductor's timer needs less
                pass
        return BEFORE["benchmark_gpu"](call, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs
    benchmarker.benchmark_gpu = timed


def milliseconds(call: Callable[[], object]) -> float:
    """The median device time of a call, with a cold L2. While the GPU does other work, the host
    queues the call. If the GPU was done before, it gets more work, up to a limit, and the time does
    not count.
    """
    call()
    buffer = torch.zeros(FLUSH // 4, dtype=torch.int32, device="cuda")
    work, times = WORK[0], []
    while len(times) < SAMPLES[bool(times) and times[0] > LONG_MS]:
        for _ in range(work):
            buffer.fill_(1)
            buffer.sum()  # which leaves no written lines in L2 for the call to pay for
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        late = start.query()
        torch.cuda.synchronize()
        if late and work < WORK[1]:
            work *= 2
        else:
            times.append(start.elapsed_time(end))
    return statistics.median(times)
