"""The rows of a run: one model after the other, or many at once, each in a process of its own, of
which whoever times is alone on the GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.model_runs.row import Job, measured, unmeasured
from benchmarks.processes.pool import Lost, outcomes
from benchmarks.processes.turns import Turns, lock_file, measure_alone
from benchmarks.records.rows import ModelRow

SECONDS = 900  # that a model may take, without waiting for the GPU


def rows_in_turn(
    args: argparse.Namespace, device: torch.device, say, deadline: float
) -> Iterator[ModelRow]:
    """A row for each job, one after the other in this process. None is begun that would take longer
    than what is left, if it took as long as the longest so far.
    """
    longest = 0.0
    for i, job in enumerate(args.jobs, 1):
        begun = time.monotonic()
        if i > 1 and begun + longest > deadline:
            return
        say.head = f"{i}/{len(args.jobs)} {job.name} {job.mode}"
        yield measured(job, args, device, say)
        longest = max(longest, time.monotonic() - begun)


class Work(NamedTuple):
    """threads: how many the process may have."""

    job: Job
    args: argparse.Namespace
    device: torch.device
    threads: int


def work(one: Work, pipe) -> None:
    torch.set_num_threads(one.threads)
    turns = Turns(lock_file(one.device), lambda stage: pipe.send(("stage", stage)))
    measure_alone(turns)
    pipe.send(("done", measured(one.job, one.args, one.device, turns.at, turns.alone())))


def rows_at_once(
    args: argparse.Namespace, device: torch.device, say, deadline: float
) -> Iterator[ModelRow]:
    """A row for each job, as they come. Compile times are left out: others compile meanwhile. No
    model is begun after the deadline.
    """
    threads = max(1, (os.cpu_count() or 1) // args.processes)
    # read by the imports of the processes
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    jobs = (Work(job, args, device, threads) for job in args.jobs)
    context = multiprocessing.get_context("spawn")
    say(f"{args.processes} at a time")
    for one, row in outcomes(jobs, work, args.processes, SECONDS, deadline, context):
        if isinstance(row, Lost):
            row = unmeasured(one.job, f"{row.status}: {row.note}")
        for contender in row.contenders:
            contender.cold_s = contender.warm_s = None
            contender.colds_s = []
        yield row
