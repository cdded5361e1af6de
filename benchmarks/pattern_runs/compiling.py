"""Compiling pieces of work ahead, many at once, so that a run finds them in the caches of Inductor
and Triton.

Processes compile at the same time, but only one at a time may time candidates for max-autotune,
whose choices are kept in the cache too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.measure.wall_time import synchronize
from benchmarks.pattern_runs.contenders import (
    ALWAYS,
    CONTENDERS,
    gradients_for,
    nothing_declined,
    results_of,
    sites,
    step,
)
from benchmarks.records.rows import Contender
from benchmarks.workloads.work import Work
from fusion_backend.compat.torch import benchmarker

ROOT = Path(__file__).resolve().parents[2]
LOCK = "FUSION_BENCH_LOCK"  # the file that whoever times candidates has locked
Task = tuple[Work, list[str]]  # what is compiled, and for which contenders


def compile_ahead(tasks: list[Task], jobs: int, seconds: float | None = None) -> list[str]:
    """Hand the tasks out to `jobs` processes, in order: "done" or "failed" of each, "" where the
    time was up before.
    """
    status = [""] * len(tasks)
    with tempfile.NamedTemporaryFile() as lock:
        environment = dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1") | {LOCK: lock.name}
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.warm"],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for _ in range(min(jobs, len(tasks)))
        ]
        todo = iter(range(len(tasks)))

        def feed(worker: subprocess.Popen) -> None:
            with contextlib.suppress(OSError), worker.stdin as requests, worker.stdout as answers:
                for i in todo:  # next() of its iterator is atomic
                    work, names = tasks[i]
                    requests.write(json.dumps([work.to_json(), names]) + "\n")
                    requests.flush()
                    status[i] = answers.readline().strip()

        threads = [threading.Thread(target=feed, args=(worker,), daemon=True) for worker in workers]
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                if deadline is not None or sys.exc_info()[0]:
                    worker.kill()
                worker.wait()
    return status


def one_at_a_time() -> None:
    """From here on Inductor times its candidates, of kernels and of matrix products, while no other
    process does.
    """
    lock, measure = open(os.environ[LOCK], "w"), benchmarker.benchmark_gpu

    def alone(*args, **kwargs):
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return measure(*args, **kwargs)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    benchmarker.benchmark_gpu = alone


def warm(work: Work, names: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = work.function
    torch.compiler.reset()
    with torch.set_grad_enabled(work.train):
        args = work.arguments(device)
        dys, found = None, {}
        for name in names:
            if name == ALWAYS and nothing_declined(found.get("fusion"), work.pattern):
                continue
            as_a_program_of_its_own()
            fn = CONTENDERS[name](reference)
            if work.train and dys is None:
                dys = gradients_for(results_of(fn, args))
            step(fn, args, dys)
            synchronize(device)
            found[name] = Contender(name, sites=sites(work.pattern)[0])
            if device.type == "cuda":
                torch.cuda.empty_cache()  # for the other processes
