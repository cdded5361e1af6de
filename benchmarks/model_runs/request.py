"""What a command line of benchmarks.models asks for, and each row of it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command_line.status import Status
from benchmarks.measure.failures import said
from benchmarks.model_runs.measuring import measure
from benchmarks.model_runs.steps import DTYPES, Plan, contenders
from benchmarks.pages.model_text import text
from benchmarks.pages.quoted import quoted_names
from benchmarks.records.rows import OK, ModelRow
from benchmarks.records.runs import Run
from benchmarks.subjects import own_model
from benchmarks.subjects.model_zoo import ENTRIES, build
from benchmarks.subjects.subject import INFER, TRAIN, Problem, Subject
from fusion_backend.frontends.own_model import where

EXACT = {"fp32": torch.float32, "fp64": torch.float64, "none": None}
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("batch", "seq", "layers")


class Job(NamedTuple):
    """A model in a mode; `kind` is the option that named it: model, module or timm."""

    kind: str
    name: str
    mode: str


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


def subject_of(job: Job, args: argparse.Namespace, device: torch.device) -> Subject:
    """The model on the device. Problem says what is wrong with it."""
    on_gpu = device.type == "cuda"
    given = NAMES[args.dtype] if args.dtype else None
    dtype = given or (torch.bfloat16 if on_gpu else torch.float32)
    if job.mode not in (INFER, TRAIN) and job.kind != "model":
        raise Problem(f"{job.name}: there is no mode {job.mode} for --{job.kind}")
    if job.kind == "module":
        return own_model.own(job.name, job.mode, device, given)
    if job.kind == "timm":
        batch = args.batch or (64 if on_gpu else 2)
        return own_model.timm(job.name, job.mode, device, dtype, batch)
    full = args.size == "full" or (args.size is None and on_gpu)
    size = ENTRIES[job.name].full if full else ENTRIES[job.name].tiny
    asked_sizes = {key: getattr(args, key) for key in SIZES if getattr(args, key)}
    size = dataclasses.replace(size, **asked_sizes)
    return build(job.name, job.mode, size, args.attention, device, dtype)


def dtype_of(subject: Subject) -> torch.dtype:
    """That of the first floating parameter; fp32 for a model without any."""
    found = (p.dtype for p in subject.model.parameters() if p.is_floating_point())
    return next(found, torch.float32)


def exact_dtype(args: argparse.Namespace, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that errors are against; None for no errors."""
    if args.dropout:
        return None
    if args.exact:
        return EXACT[args.exact]
    return torch.float32 if dtype.itemsize < 4 else torch.float64


def measured(job: Job, args: argparse.Namespace, device: torch.device, say) -> ModelRow:
    """The row of a model in a mode. Where it cannot be built, the row has no contenders, and a note
    says why.
    """
    row = ModelRow(job.name, job.mode, "", {}, None, [])
    say("building")
    try:
        subject = subject_of(job, args, device)
    except Problem as problem:
        row.notes.append(f"not measured: {problem}")
        return row
    except Exception as error:  # of a library, or out of memory: the other models go on
        row.notes.append(f"not measured: building it raised {said(error)}")
        return row
    row.name, dtype = subject.name, dtype_of(subject)
    if args.dropout:
        subject.model.train()
    row.dtype = next(word for word, known in DTYPES.items() if known == dtype)
    gate = args.gate or ("auto" if device.type == "cuda" else "always")
    row.about = subject.about | dict(
        attention=args.attention if job.kind == "model" else None,
        optimizer=args.optimizer if job.mode == TRAIN else None,
        dropout="on" if args.dropout else None,
        gate=gate,
        verify="on" if args.verify else None,
        measure_s=args.measure_s if gate == "auto" else None,
        parameters=sum(p.numel() for p in subject.model.parameters()),
    )
    plan = Plan(
        train=job.mode == TRAIN,
        optimizer=row.about["optimizer"],
        cold=not args.once,
        exact=exact_dtype(args, dtype),
        rounds=args.rounds,
        least_ms=args.least_ms,
        profile=not args.no_profile,
        trace=args.trace,
    )
    makes = contenders(gate, args.max_autotune, args.verify, args.measure_s)
    try:
        return measure(subject, makes, plan, row, device, say)
    except Exception as error:
        row.notes.append(f"stopped: {where(error)}")
        return row


def measure_all(
    run: Run, args: argparse.Namespace, device: torch.device, status: Status, begun: float
) -> list[ModelRow]:
    """Measure the jobs until the time since `begun` is up or Ctrl-C: the rows of this run, which
    are also put into `run`, printed and written one by one.
    """
    mine, longest, jobs = [], 0.0, args.jobs
    try:
        for i, job in enumerate(jobs, 1):
            now = time.monotonic()
            if args.minutes and mine and now + longest > begun + args.minutes * 60:
                run.about["stopped"] = f"time is up after {len(mine)} of {len(jobs)} models"
                break
            status.head = f"{i}/{len(jobs)} {job.name} {job.mode}"
            mine.append(measured(job, args, device, status))
            longest = max(longest, time.monotonic() - now)
            run.rows = [row for row in run.rows if not replaces(mine[-1], row)] + [mine[-1]]
            status.clear()
            print(f"\n{text(run.rows[-1])}", flush=True)
            if args.trace:
                show_kernels(run.rows[-1], args.trace)
            if args.out:
                run.save(args.out)
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
