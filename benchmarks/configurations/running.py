"""Launching and timing one configuration of a kernel after the other."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton

from fusion_backend.decide.kernel_trials import Trials
from fusion_backend.kernels.common.launch import TRIAL, trial
from fusion_backend.kernels.common.rows import Config

NO_GPU = (
    "kernels need a GPU, or TRITON_INTERPRET=1 (set before Python starts) to be tried in Triton's "
    "interpreter"
)
INTERPRETED = "CPU: the kernels run in Triton's interpreter; their times mean nothing"


class Call(NamedTuple):
    work: str
    config: str  # in words, as benchmarks.tune reads them
    run: Callable[[], object]


class Time(NamedTuple):
    ms: float
    config: str


def run_now(kernel, grid, args, options) -> None:
    """Launch without torch's wrapper, which costs a millisecond a call outside compiled code."""
    kernel[grid](*args, **options)


def said(c: Config) -> str:
    """The configuration in words, as benchmarks.tune reads them: block=4096 rows=1 ..."""
    return " ".join(f"{k}={int(v)}" for k, v in c._asdict().items() if v)


def row_configs(n: int) -> list[tuple[int, int, int]]:
    """BLOCK, rows of a program and warps of kernels that hold rows of n elements, with 8 to 64
    elements for each thread.
    """
    block = triton.next_power_of_2(n)
    configs = [(block, each, warps) for each in (1, 2, 4) for warps in (4, 8, 16, 32)]
    return [c for c in configs if 8 <= c[0] * c[1] // (32 * c[2]) <= 64]


def read_ahead(configs: list[tuple]) -> list[tuple]:
    """The same configurations with a few programs on each multiprocessor and loops over the rows,
    as far as there is shared memory for rows of bf16.

    One program of 32 warps fills a multiprocessor. While it computes, nothing is read, except the
    next row, as here.
    """
    ahead = [
        (*c, max(1, 32 // c[2] * more // 2), stages)
        for c in configs
        for more in (1, 2)
        for stages in (2, 3)
    ]
    return [c for c in dict.fromkeys(ahead) if c[0] * c[1] * 2 * (c[4] - 1) * c[3] <= 220 << 10]


def compile_ahead(configs: list[Call]) -> None:
    """Compile what all of them launch, several kernels at a time. Whatever fails here fails again
    when it is timed, and is named there.
    """
    trials = Trials()
    for _ in trials.rounds():
        with trial(trials):
            for config in configs:
                with contextlib.suppress(Exception):
                    config.run()


def compiling() -> bool:
    """Are launches only compiled at the moment, so that results are not computed?"""
    return TRIAL.get() is not run_now


def timed(configs: Iterator[Call], clock: Callable, calls: int) -> dict[str, list[Time]]:
    """The times of every configuration that runs, by work; one that does not compile is named."""
    found: dict[str, list[Time]] = {}
    asked = list(configs)
    if torch.cuda.is_available():
        compile_ahead(asked)
    with trial(run_now):
        for work, config, run in asked:
            try:
                run()
            except Exception as error:  # out of registers or shared memory: worth a line
                why = f"{type(error).__name__}: {str(error)[:80]}"
                print(f"{work}: {config} fails: {why}", flush=True)
                continue
            ms = statistics.median(clock(run) for _ in range(calls))
            found.setdefault(work, []).append(Time(ms, config))
    return found
