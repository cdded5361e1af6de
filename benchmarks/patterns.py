"""The built-in patterns under eager, plain Inductor, Inductor max-autotune and fusion, kernel by
kernel.

    python -m benchmarks.patterns [--out FILE.json]          # the whole table
    python -m benchmarks.patterns --minutes 10               # what there is time for: every pattern first
    python -m benchmarks.patterns --only layer_norm softmax --sizes large --dtype bf16,f32 --train
    python -m benchmarks.patterns --only rms_norm --sizes rows=4096,n=5120 --contenders inductor fusion
    python -m benchmarks.patterns --rows 'layer_norm bf16 rows=16384 n=4096 train' window=256

For each piece of work: device time (CUDA events around a call, L2 flushed before it and the launch
queued ahead, so that the host does not show), time of a whole call including the host, bytes and
operations counted, the floor that they and the ceilings measured in the same run give, errors
against fp64, peak memory and what is kept for backward. Contenders take turns in one process;
Inductor's code is timed a second time under another name: that difference is the noise.
docs/benchmarks.md says how to read the table. Exit code: 0, 1 if a contender failed or was wrong, 2
for a request that makes no sense, 130 after Ctrl-C, which keeps what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.contenders import CONTENDERS, HOW, Bench, Maker, measure
from benchmarks.measure import said
from benchmarks.options import duration, output, positive
from benchmarks.progress import progress
from benchmarks.readme import quoted_names
from benchmarks.results import Row, Run, machine
from benchmarks.selection import add_arguments, selected, spread
from benchmarks.table import heading, honest, noise_of, summary, text
from benchmarks.warm import compile_ahead
from benchmarks.work import NAMES, Work
from fusion_backend.frontends.loading import patterns

AUTOTUNE = "max-autotune"
Plan = list[tuple[Work, dict[str, Maker]]]  # each row and its contenders, in order
# Of the time given with --minutes, compiling ahead has what starting and measuring leave, and at
# least this part.
WARM_SHARE, SECONDS_TO_START, SECONDS_A_CONTENDER = 0.3, 20.0, 0.6  # on an H200


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    args, parser = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    try:
        plan = planned(args, device.type == "cuda")
    except ValueError as error:
        parser.error(str(error))
    deadline = started + args.minutes * 60 if args.minutes else float("inf")
    run, mine = Run("patterns", machine(device, "benchmarks.patterns") | dict(noise={})), []
    try:
        if args.add:
            run.go_on_from(args.out)
    except ValueError as error:
        parser.error(str(error))
    jobs = args.jobs if args.jobs is not None else processes() if device.type == "cuda" else 0
    try:
        if jobs:
            run.about["compiled_ahead"] = ahead(plan, jobs, args.minutes)
        bench = Bench.of(device, args.rounds)._replace(trace=args.trace)
        run.about |= dict(
            copy_bytes_s=bench.copy_bytes_s,
            matrix_flops_s=bench.matrix_flops_s,
            rounds=bench.rounds,
        )
        print(heading(run), flush=True)
        measure_all(plan, bench, run, mine, args.out, deadline)
    except KeyboardInterrupt:
        run.about["stopped"] = f"interrupted after {len(mine)} of {len(plan)} rows"
    run.about["seconds"] = round(time.monotonic() - started, 1)
    print(summary(run))
    if args.out and mine:
        run.save(args.out)
        print(f"{len(run.rows)} rows in {args.out}; {run.about['seconds']:.0f} s")
    return 130 if run.about.get("stopped", "").startswith("interrupted") else honest(mine)


def planned(args: argparse.Namespace, on_gpu: bool) -> Plan:
    """Rows in the order in which they are wanted. ValueError says what makes no sense."""
    works, makers = selected(args, on_gpu), named(args.contenders)
    if args.minutes:
        works = spread(works)
    if not args.quoted:
        return [(work, dict(makers)) for work in works]
    quoted = quoted_names(args.quoted, "rows")
    works.sort(key=lambda work: work.name not in quoted)
    counted = {
        name: make for name, make in makers.items() if name in ("inductor", "fusion")
    } or makers
    return [(work, dict(makers if work.name in quoted else counted)) for work in works]


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
    """Compile first, in many processes. What was done.

    Max-autotune takes longest. Without a limit matrix products come first, of which that is most
    true. With one, max-autotune comes last, but for rows that have it while others have not; what
    was not in time is taken out of the plan, for its compilation would take the time of all that
    follows. Anything else compiles when its turn comes.
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
    told = compile_ahead(tasks, jobs, seconds)
    late = [task for task, answer in zip(tasks, told, strict=True) if not answer]
    for work, makers in plan:
        if minutes and (work, [AUTOTUNE]) in late:
            del makers[AUTOTUNE]
    found = dict(
        done=told.count("done"), failed=told.count("failed"), late=len(late), processes=jobs
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
    return {name: make for name, make in CONTENDERS.items() if not names or name in names}


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.patterns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"some of {', '.join(CONTENDERS)}"
    )
    parser.add_argument(
        "--rounds", type=positive, help="turns of every contender (default: 7, without a GPU 3)"
    )
    parser.add_argument(
        "--minutes",
        type=duration,
        help="stop before this time is up; every pattern has its turn first",
    )
    parser.add_argument("--quoted", type=Path, metavar="PAGE.md",
        help="the rows whose figures a page gives first, "
                        "of the others inductor and fusion alone")  # fmt: skip
    parser.add_argument(
        "--jobs",
        type=int,
        help="processes that compile ahead (default: one a core; 0 without a GPU)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="a Chrome trace a contender; show its kernels"
    )
    parser.add_argument(
        "--out", type=output, metavar="FILE", help="write the results as JSON, anew after each row"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what FILE has of other rows: a run in parts"
    )
    args = parser.parse_args(argv)
    if args.add and not args.out:
        parser.error("--add keeps what the file has: give --out")
    if args.jobs is not None and args.jobs < 0:
        parser.error(f"--jobs {args.jobs}: 0, or a number of processes")
    return args, parser


if __name__ == "__main__":
    sys.exit(main())
