"""A process that measures one graph and ends: its caches, its output, and what it sends.

It sends ("stage", words) whenever it does something else, and in the end ("done", row).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.foreign_code.listed import graphs
from benchmarks.foreign_runs.measuring import How, measure, start
from benchmarks.foreign_runs.rows import GraphRow
from benchmarks.foreign_runs.steps import contenders
from benchmarks.measure.failures import said
from benchmarks.processes.turns import Turns, lock_file, measure_alone
from benchmarks.records.rows import FAILED
from fusion_backend.frontends.loading import patterns

LOG = "log"  # the file in a worker's folder that has what it printed


class Work(NamedTuple):
    """One graph, by name; "" fills the caches that the others begin with. folder: of this process
    alone; caches: the folder that its caches begin as, None for those of the environment.
    """

    name: str
    how: How
    device: torch.device
    folder: Path
    caches: Path | None
    threads: int


def work(job: Work, pipe) -> None:
    """What the process does. What the graph raises is in its row."""
    begun = time.monotonic()
    quiet(job.folder)
    fresh_caches(job)
    torch.set_num_threads(job.threads)
    if not job.name:
        begin(job)
        pipe.send(("done", None))
        return
    graph = graphs()[job.name]
    row = GraphRow.of_graph(graph)
    turns = Turns(lock_file(job.device), lambda stage: pipe.send(("stage", stage)))
    measure_alone(turns)
    try:
        measure(graph, job.how, row, turns, job.device)
    except Exception as error:
        row.status, row.note = FAILED, f"{turns.stage}: {said(error)}"
    row.seconds = time.monotonic() - begun
    pipe.send(("done", row))


def begin(job: Work) -> None:
    """Raises where a process that is started like this one cannot use the device."""
    torch.ones(1, device=job.device).sum().item()
    patterns()
    for train in (False, True):
        with torch.set_grad_enabled(train):
            start(contenders(job.how.options), train, job.device)


def quiet(folder: Path) -> None:
    """What torch, Triton and C++ print goes to a file: the parent shows it if the process dies."""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())


def fresh_caches(job: Work) -> None:
    """Inductor, Triton and the backend keep what they compile in the process's own folder."""
    if job.caches is None:
        return
    if job.name:
        own = job.folder / "caches"
        shutil.copytree(job.caches, own)
    else:
        own = job.caches
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    os.environ["TRITON_CACHE_DIR"] = str(own / "triton")
