"""The row of one model in one mode, from its name to what was measured of it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.measure.failures import said
from benchmarks.model_runs.measuring import NOBODY_ELSE, measure
from benchmarks.model_runs.steps import DTYPES, Plan, contenders
from benchmarks.records.rows import ModelRow
from benchmarks.subjects import own_model
from benchmarks.subjects.model_zoo import ENTRIES, build
from benchmarks.subjects.subject import INFER, TRAIN, Problem, Subject
from fusion_backend.frontends.own_model import where
from fusion_backend.measure import store

EXACT = {"fp32": torch.float32, "fp64": torch.float64, "none": None}
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("batch", "seq", "layers")


class Job(NamedTuple):
    """A model in a mode; `kind` is the option that named it: model, module or timm."""

    kind: str
    name: str
    mode: str


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


def measured(
    job: Job,
    args: argparse.Namespace,
    device: torch.device,
    say,
    alone: contextlib.AbstractContextManager = NOBODY_ELSE,
) -> ModelRow:
    """The row of a model in a mode. Where it cannot be built, the row has no contenders, and a note
    says why. It is timed inside of `alone`.
    """
    say("building")
    if args.without_seed:
        store.SEED = Path(os.devnull)
        store.seed.cache_clear()
    try:
        subject = subject_of(job, args, device)
    except Problem as problem:
        return unmeasured(job, problem)
    except Exception as error:  # of a library, or out of memory: the other models go on
        return unmeasured(job, f"building it raised {said(error)}")
    row = unmeasured(job)
    row.name, dtype = subject.name, dtype_of(subject)
    if args.dropout:
        subject.model.train()
    row.dtype = next(word for word, known in DTYPES.items() if known == dtype)
    gate = args.gate or ("auto" if device.type == "cuda" else "always")
    row.about = subject.about | dict(
        attention=subject.about.get("attention"),
        optimizer=args.optimizer if job.mode == TRAIN else None,
        dropout="on" if args.dropout else None,
        gate=gate,
        verify="on" if args.verify else None,
        measure_s=args.measure_s if gate == "auto" else None,
        seed="left out" if args.without_seed else None,
        parameters=sum(p.numel() for p in subject.model.parameters()),
    )
    plan = Plan(
        train=job.mode == TRAIN,
        optimizer=row.about["optimizer"],
        cold=args.cold,
        warm=not args.once,
        exact=exact_dtype(args, dtype),
        rounds=args.rounds,
        least_ms=args.least_ms,
        profile=not args.no_profile,
        trace=args.trace,
        keep_answers=args.keep_answers,
    )
    makes = contenders(gate, args.max_autotune, args.verify, args.measure_s)
    try:
        return measure(subject, makes, plan, row, device, say, alone)
    except Exception as error:
        row.notes.append(f"stopped: {where(error)}")
        return row


def unmeasured(job: Job, why: object = "") -> ModelRow:
    """A row without contenders, and why it has none."""
    notes = [f"not measured: {why}"] if why else []
    return ModelRow(job.name, job.mode, "", {}, None, [], notes=notes)
