"""The graphs of a run, each in a process of its own, and the file that has their rows."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.foreign_code.problems import Graph
from benchmarks.foreign_runs.measuring import How
from benchmarks.foreign_runs.rows import GraphRow
from benchmarks.foreign_runs.summary import summary
from benchmarks.foreign_runs.worker import LOG, Work, work
from benchmarks.processes.pool import Lost, outcomes
from benchmarks.records.runs import Run

SECONDS_TO_START = 300  # of the process that fills the caches which the others begin with
# Set before the server of the processes starts, whose imports read them: one compiler thread a
# process, for there is a process a core; and CUDA is not touched before a process has forked.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def contexts() -> Iterator:
    """Ways to start a process, the fastest first: from a server that has everything imported and
    nothing computed, or anew, where the imports have touched CUDA.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__, "fusion_backend.frontends.dynamo"])
    yield context
    yield multiprocessing.get_context("spawn")


class Runner:
    """Measures graphs and keeps the rows in a run, which is written after each of them."""

    def __init__(self, run: Run, how: How, device, args: argparse.Namespace, show: Callable):
        self.run, self.how, self.device, self.args, self.show = run, how, device, args, show
        self.threads = max(1, (os.cpu_count() or 1) // args.processes)

    def measure(self, found: dict[str, Graph], deadline: float) -> None:
        with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as folder:
            root = Path(folder)
            caches = None if self.args.warm else root / "caches"
            context = self.fill(root, caches)
            jobs = (self.job(root, i, name, caches) for i, name in enumerate(found))
            done, processes = 0, self.args.processes
            for job, outcome in outcomes(jobs, work, processes, self.args.limit, deadline, context):
                row, done = outcome, done + 1
                if isinstance(outcome, Lost):
                    note = outcome.note + last_words(job.folder / LOG)
                    row = GraphRow.of_graph(found[job.name], outcome.status, note)
                shutil.rmtree(job.folder, ignore_errors=True)
                self.keep(row, done, len(found))
            if done < len(found):
                self.run.about["stopped"] = f"time is up after {done} of {len(found)} graphs"

    def job(self, root: Path, i: int, name: str, caches: Path | None) -> Work:
        folder = root / str(i)
        folder.mkdir()
        return Work(name, self.how, self.device, folder, caches, self.threads)

    def fill(self, root: Path, caches: Path | None):
        """What every process would make first, such as the templates of the patterns, is made once.
        Returns the way to start processes. SystemExit where none can use the device.
        """
        if caches:
            caches.mkdir()
        for i, context in enumerate(contexts(), 1):
            job = self.job(root, -i, "", caches)
            [(_, outcome)] = outcomes([job], work, 1, SECONDS_TO_START, context=context)
            if not isinstance(outcome, Lost):
                return context
        raise SystemExit(f"no process can start: {outcome.note}{last_words(job.folder / LOG)}")

    def keep(self, row: GraphRow, done: int, of: int) -> None:
        self.run.rows = [old for old in self.run.rows if old.name != row.name] + [row]
        self.run.about["summary"] = summary(self.run.rows)
        self.show(row, done, of)
        if self.args.out:
            self.run.save(self.args.out)


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


def together(paths: list[Path]) -> Run:
    """The rows of several files, of parts of the set say, under what the first says about its run;
    with the commands and revisions of all. A graph that is in two has its row from the later one.
    """
    about, rows = load(paths[0])
    about.pop("seconds", None)
    found = {row.name: row for row in rows}
    for path in paths[1:]:
        other, rows = like(path, about)
        found |= {row.name: row for row in rows}
        for key in ("command", "revision"):
            about[key] = "; ".join(dict.fromkeys(f"{about[key]}; {other[key]}".split("; ")))
    rows = list(found.values())
    return Run("foreign", about | dict(summary=summary(rows)), rows)


def before(path: Path, about: dict) -> list[GraphRow]:
    """The rows of a file, where there is one, that a run on this machine may go on from."""
    return like(path, about)[1] if path.exists() else []


def like(path: Path, about: dict) -> tuple[dict, list[GraphRow]]:
    """`load`, of a file that was measured on the same machine with the same options. ValueError
    where it was not.
    """
    old, rows = load(path)
    keys = ("gpu", "torch", "triton", "options", "size")
    if other := [key for key in keys if old.get(key) != about.get(key)]:
        raise ValueError(f"{path} was measured with another {' and '.join(other)}")
    return old, rows


def until(minutes: float | None) -> float:
    return time.monotonic() + minutes * 60 if minutes else float("inf")
