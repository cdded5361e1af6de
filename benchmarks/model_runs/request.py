"""What a command line of benchmarks.models asks for, and the run of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.command_line.status import Status
from benchmarks.model_runs.row import Job
from benchmarks.model_runs.running import rows_at_once, rows_in_turn
from benchmarks.pages.model_text import text
from benchmarks.pages.quoted import quoted_names
from benchmarks.records.rows import OK, ModelRow
from benchmarks.records.runs import Run
from benchmarks.subjects.model_zoo import ENTRIES
from benchmarks.subjects.subject import TRAIN


def asked(args: argparse.Namespace) -> list[Job]:
    """What is to be measured. ValueError where there is no such model."""
    pairs = quoted_names(args.quoted, "models") if args.quoted else []
    jobs = [Job("model", *pair.split(" ", 1)) for pair in pairs]
    names = [(kind, name) for kind in ("model", "module", "timm") for name in getattr(args, kind)]
    jobs += [Job(kind, name, mode) for kind, name in names for mode in args.mode]
    if unknown := sorted({job.name for job in jobs if job.kind == "model"} - set(ENTRIES)):
        raise ValueError(f"no model {', '.join(unknown)}; there is {', '.join(ENTRIES)}")
    return jobs


def refused(args: argparse.Namespace) -> str:
    """Why options do not go together, or ""."""
    inference = any(job.mode != TRAIN for job in args.jobs)
    if not args.jobs:
        return "nothing to measure: give --model, --module or --timm"
    if args.add and not args.out:
        return "--add keeps what the file has: give --out"
    if args.trace and args.no_profile:
        return "--trace is written by the profiler that --no-profile leaves out"
    if args.processes > 1 and not args.once:
        return "--processes measures no compile times, for others compile meanwhile: give --once"
    if args.once and args.cold > 1:
        return "--once compiles once, --cold more often"
    if args.optimizer and all(job.mode != TRAIN for job in args.jobs):
        return "--optimizer is part of a training step: give --mode train"
    if args.dropout and (args.module or inference):
        return (
            "--dropout is for --mode train of --model and --timm; one of --module has its own mode"
        )
    if args.dropout and args.exact not in (None, "none"):
        return (
            "--dropout draws other numbers in every contender: "
            "there are no errors to show, --exact none"
        )
    return ""


def measure_all(
    run: Run, args: argparse.Namespace, device: torch.device, status: Status, begun: float
) -> list[ModelRow]:
    """Measure the jobs until the time since `begun` is up or Ctrl-C: the rows of this run, which
    are also put into `run`, printed and written one by one.
    """
    mine, each = [], rows_in_turn if args.processes == 1 else rows_at_once
    deadline = begun + args.minutes * 60 if args.minutes else float("inf")
    try:
        for row in each(args, device, status, deadline):
            mine.append(row)
            run.rows = [old for old in run.rows if not replaces(row, old)] + [row]
            status.clear()
            print(f"\n{text(row)}", flush=True)
            if args.trace:
                show_kernels(row, args.trace)
            if args.out:
                run.save(args.out)
        if len(mine) < len(args.jobs):
            run.about["stopped"] = f"time is up after {len(mine)} of {len(args.jobs)} models"
    except KeyboardInterrupt:
        run.about["stopped"] = f"by Ctrl-C in {status.head}"
    status.clear()
    return mine


def finish(run: Run, mine: list[ModelRow], jobs: int) -> int:
    """Say why the run stopped early, if it did; the exit status."""
    if stopped := run.about.get("stopped"):
        print(f"\nstopped: {stopped}; {len(mine)} of {jobs} measured", file=sys.stderr)
    if "Ctrl-C" in (stopped or ""):
        return 130
    fine = all(
        row.contenders and all(one.status == OK and one.step for one in row.contenders)
        for row in mine
    )
    return 0 if fine else 1


def replaces(new: ModelRow, old: ModelRow) -> bool:
    """The same model with the same sizes, or one that could not be measured before."""
    return (
        old.title == new.title
        or not old.contenders
        and (old.name, old.mode) == (new.name, new.mode)
    )


def show_kernels(row: ModelRow, folder: Path) -> None:
    """Print the longest kernels of each contender."""
    for one in row.contenders:
        if one.kernels:
            print(f"  longest kernels of {one.name}")
        for kernel in one.kernels:
            share = kernel["ms"] / one.device_ms
            print(
                f"  {kernel['ms']:10.4f} ms {share:6.1%}  {kernel['kind']:26}{kernel['name'][:80]}"
            )
    print(f"  traces in {folder}: open them in https://ui.perfetto.dev or chrome://tracing")
