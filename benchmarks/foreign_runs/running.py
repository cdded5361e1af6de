"""The graphs of a run, each in a process of its own, and the file that has their rows."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.foreign_code.problems import Graph
from benchmarks.foreign_runs.measuring import How
from benchmarks.foreign_runs.pool import Lost, outcomes
from benchmarks.foreign_runs.rows import GraphRow
from benchmarks.foreign_runs.summary import summary
from benchmarks.foreign_runs.worker import LOG, Work, work
from benchmarks.records.runs import Run

SECONDS_TO_START = 300  # of the process that fills the caches which the others begin with
# Set before the server of the processes starts, whose imports read them: one compiler thread a
# process, for there is a process a core; and CUDA is not touched before a process has forked.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def server():
    """Processes that begin with everything imported and nothing computed."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__, "fusion_backend.frontends.dynamo"])
    return context


class Runner:
    """Measures graphs and keeps the rows in a run, which is written after each of them."""

    def __init__(self, run: Run, how: How, args: argparse.Namespace, show: Callable):
        self.run, self.how, self.args, self.show = run, how, args, show
        self.threads = max(1, (os.cpu_count() or 1) // args.processes)

    def measure(self, found: dict[str, Graph], deadline: float) -> None:
        with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as folder:
            root, context = Path(folder), server()
            caches = None if self.args.warm else root / "caches"
            if caches:
                self.fill(root, caches, context)
            jobs = (self.job(root, i, name, caches) for i, name in enumerate(found))
            done = 0
            for job, outcome in outcomes(
                jobs, work, self.args.processes, self.args.limit, deadline, context
            ):
                row = outcome
                if isinstance(outcome, Lost):
                    row = lost(found[job.name], outcome, job.folder / LOG)
                done += 1
                self.keep(row, done, len(found))
            if done < len(found):
                self.run.about["stopped"] = f"time is up after {done} of {len(found)} graphs"

    def job(self, root: Path, i: int, name: str, caches: Path | None) -> Work:
        folder = root / str(i)
        folder.mkdir()
        return Work(name, self.how, folder, caches, self.threads)

    def fill(self, root: Path, caches: Path, context) -> None:
        """What every process would make first, such as the templates of the patterns, made once."""
        caches.mkdir()
        job = self.job(root, -1, "", caches)
        for _, outcome in outcomes([job], work, 1, SECONDS_TO_START, context=context):
            if isinstance(outcome, Lost):
                raise SystemExit(
                    f"no process can start: {outcome.note}{last_words(job.folder / LOG)}"
                )

    def keep(self, row: GraphRow, done: int, of: int) -> None:
        self.run.rows = [old for old in self.run.rows if old.name != row.name] + [row]
        self.run.about["summary"] = summary(self.run.rows)
        self.show(row, done, of)
        if self.args.out:
            self.run.save(self.args.out)


def lost(graph: Graph, outcome: Lost, log: Path) -> GraphRow:
    return GraphRow.of_graph(graph, outcome.status, outcome.note + last_words(log))


def last_words(log: Path) -> str:
    """The last line that a process printed, where it printed any."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:200]}" if said else ""


def load(path: Path) -> tuple[dict, list[GraphRow]]:
    """What a file says about its run, and its rows. ValueError where it is another kind of run."""
    run = Run.load(path)
    if run.kind != "foreign":
        raise ValueError(f"{path} holds a run of benchmarks.{run.kind}")
    try:
        return run.about, [GraphRow.of_json(row) for row in run.rows]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path} was written by another version of benchmarks.foreign: {error}"
        ) from None


def before(path: Path, about: dict) -> list[GraphRow]:
    """The rows of a file, where there is one, that a run on this machine may go on from."""
    if not path.exists():
        return []
    old, rows = load(path)
    keys = ("gpu", "torch", "triton", "options", "size")
    if other := [key for key in keys if old.get(key) != about.get(key)]:
        raise ValueError(f"{path} was measured with another {' and '.join(other)}")
    return rows


def until(minutes: float | None) -> float:
    return time.monotonic() + minutes * 60 if minutes else float("inf")
