"""Which rows of benchmarks.patterns are measured, in which order and under which contenders."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.command_line.progress import progress
from benchmarks.measure.failures import said
from benchmarks.pages.pattern_text import noise_of, text
from benchmarks.pages.quoted import quoted_names
from benchmarks.pattern_runs.compiling import compile_ahead
from benchmarks.pattern_runs.contenders import CONTENDERS, FLEX, HOW, Maker
from benchmarks.pattern_runs.measuring import Bench, measure
from benchmarks.records.rows import Row
from benchmarks.records.runs import Run
from benchmarks.workloads.selection import selected, spread
from benchmarks.workloads.work import NAMES, Work

AUTOTUNE = "max-autotune"
Plan = list[tuple[Work, dict[str, Maker]]]  # each row and its contenders, in order
# Of the time given with --minutes, compiling ahead has what starting and measuring leave, and at
# least this part.
WARM_SHARE, SECONDS_TO_START, SECONDS_A_CONTENDER = 0.3, 20.0, 0.6  # on an H200


def planned(args: argparse.Namespace, on_gpu: bool) -> Plan:
    """Rows in the order in which they are wanted. ValueError says what makes no sense."""
    works, makers = selected(args, on_gpu), named(args.contenders)
    if args.minutes:
        works = spread(works)
    if not args.quoted:
        return [(work, able(work, makers)) for work in works]
    quoted = quoted_names(args.quoted, "rows")
    works.sort(key=lambda work: work.name not in quoted)
    counted = {
        name: make for name, make in makers.items() if name in ("inductor", "fusion")
    } or makers
    return [(work, able(work, makers if work.name in quoted else counted)) for work in works]


def able(work: Work, makers: dict[str, Maker]) -> dict[str, Maker]:
    """The contenders that can do the work: flex_attention only where there is code for it."""
    other = hasattr(work.function, FLEX)
    return {name: make for name, make in makers.items() if other or name != FLEX}


def measure_all(
    plan: Plan, bench: Bench, run: Run, mine: list[Row], out: Path | None, deadline: float
) -> None:
    """Append a row for each piece of work to `mine` and `run`, print it and write the file, until
    the deadline.
    """
    begun = time.monotonic()
    with progress(len(plan), "patterns") as begin:
        for i, (work, makers) in enumerate(plan):
            now = time.monotonic()
            if i and now + (now - begun) / i > deadline:
                run.about["stopped"] = f"time is up after {i} of {len(plan)} rows"
                return
            begin(work.name)
            mine.append(one(work, bench, makers))
            run.rows = [row for row in run.rows if row.name != work.name] + mine[-1:]
            run.about["noise"] = noise_of(run.rows)
            print(text(mine[-1]), flush=True)
            if out:
                run.save(out)


def one(work: Work, bench: Bench, makers: dict[str, Maker]) -> Row:
    """A row even where the work itself cannot be done."""
    try:
        if bench.clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return measure(work, bench, makers)
    except Exception as error:
        row = Row(
            work.name,
            work.pattern,
            work.case,
            NAMES[work.dtype],
            work.train,
            work.linear,
            0,
            0,
            0.0,
            0.0,
            [],
        )
        row.note = said(error)
        return row


def ahead(plan: Plan, jobs: int, minutes: float | None) -> dict:
    """Compile the rows in many processes before any is measured; returns what was done.

    Max-autotune takes longest to compile. Without a limit of time, matrix products come first, of
    which that is most true. With a limit, max-autotune comes last, except for the rows that have it
    where not all do. Max-autotune that is not compiled in time is taken out of the plan, for its
    compilation would take the time of all that follows; any other contender compiles when its row
    is measured.
    """
    start, seconds = time.monotonic(), None
    fast = [
        (work, [name for name in HOW if name in makers and name != AUTOTUNE])
        for work, makers in plan
    ]
    slow = [(work, [AUTOTUNE]) for work, makers in plan if AUTOTUNE in makers]
    tasks = fast + slow if len(slow) == len(plan) else fast[: len(slow)] + slow + fast[len(slow) :]
    tasks = [task for task in tasks if task[1]]
    if minutes is None:
        tasks.sort(key=lambda task: -task[0].flops / task[0].bytes)
    else:
        measuring = SECONDS_A_CONTENDER * sum(len(makers) for _, makers in plan)
        seconds = max(minutes * 60 - SECONDS_TO_START - measuring, minutes * 60 * WARM_SHARE)
    print(f"compiling {len(plan)} rows ahead with {jobs} processes", file=sys.stderr, flush=True)
    status = compile_ahead(tasks, jobs, seconds)
    late = [task for task, answer in zip(tasks, status, strict=True) if not answer]
    for work, makers in plan:
        if minutes and (work, [AUTOTUNE]) in late:
            del makers[AUTOTUNE]
    found = dict(
        done=status.count("done"), failed=status.count("failed"), late=len(late), processes=jobs
    )
    found["seconds"] = round(time.monotonic() - start, 1)
    if left_out := sum(minutes is not None and names == [AUTOTUNE] for _, names in late):
        found["without_max_autotune"] = left_out
    print(f"compiled {found}", file=sys.stderr)
    return found


def processes() -> int:
    return max(1, min(14, (os.cpu_count() or 2) - 2))


def named(names: list[str] | None) -> dict[str, Maker]:
    if unknown := sorted(set(names or ()) - set(CONTENDERS)):
        raise ValueError(f"no contender {', '.join(unknown)}; there is {', '.join(CONTENDERS)}")
    names = names or [name for name in CONTENDERS if name != FLEX]
    return {name: make for name, make in CONTENDERS.items() if name in names}
