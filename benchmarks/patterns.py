"""The built-in patterns under eager, plain Inductor, Inductor max-autotune and fusion, kernel by kernel.

    python -m benchmarks.patterns [--out FILE.json]          # the whole table: at most 10 minutes on an H200
    python -m benchmarks.patterns --minutes 5                # a subset: every pattern first, then what time is left for
    python -m benchmarks.patterns --only layer_norm softmax --sizes large --dtype bf16,f32 --train
    python -m benchmarks.patterns --only rms_norm --sizes rows=4096,n=5120 --contenders inductor fusion

For each piece of work: device time (CUDA events around a call, L2 flushed before it and the launch queued ahead, so
that the host does not show), time of a whole call including the host, bytes and operations counted, the floor that
they and the ceilings measured in the same run give, errors against fp64, peak memory and what is kept for backward.
Contenders take turns in one process; Inductor's code is timed a second time under another name: that difference is the
noise. docs/benchmarks.md says how to read the table. Exit code: 0, 1 if a contender failed or was wrong, 2 for a
request that makes no sense, 130 after Ctrl-C, which keeps what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.contenders import CONTENDERS, HOW, Bench, Maker, measure, said
from benchmarks.progress import progress
from benchmarks.results import Row, Run, machine
from benchmarks.selection import add_arguments, selected, spread
from benchmarks.table import heading, honest, noise_of, summary, text
from benchmarks.warm import compile_ahead
from benchmarks.work import NAMES, Work
from fusion_backend.backend import patterns

WARM_SHARE = 0.3  # of the time given with --minutes, at most, is spent on compiling ahead


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    args, parser = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    try:
        works = selected(args, device.type == "cuda")
        makers = named(args.contenders)
    except ValueError as error:
        parser.error(str(error))
    if args.minutes:
        works = spread(works)
    deadline = started + args.minutes * 60 if args.minutes else float("inf")
    run = Run("patterns", machine(device, "benchmarks.patterns") | dict(noise={}))
    jobs = args.jobs if args.jobs is not None else processes() if device.type == "cuda" else 0
    try:
        if jobs:
            names = [name for name in makers if name in HOW]
            run.about["compiled_ahead"] = ahead(works, names, jobs, args.minutes)
        bench = Bench.of(device, args.rounds)._replace(trace=args.trace)
        run.about |= dict(copy_bytes_s=bench.copy_bytes_s, matrix_flops_s=bench.matrix_flops_s, rounds=bench.rounds)
        print(heading(run), flush=True)
        measure_all(works, bench, makers, run, args.out, deadline)
    except KeyboardInterrupt:
        run.about["stopped"] = f"interrupted after {len(run.rows)} of {len(works)} rows"
    run.about["seconds"] = round(time.monotonic() - started, 1)
    print(summary(run))
    if args.out and run.rows:
        run.save(args.out)
        print(f"{len(run.rows)} rows in {args.out}; {run.about['seconds']:.0f} s")
    return 130 if run.about.get("stopped", "").startswith("interrupted") else honest(run)


def measure_all(
    works: list[Work], bench: Bench, makers: dict[str, Maker], run: Run, out: Path | None, deadline: float
) -> None:
    """Append a row for each work to `run`, print it and write the file again, until the deadline."""
    begun = time.monotonic()
    with progress(len(works), "patterns") as begin:
        for i, work in enumerate(works):
            now = time.monotonic()
            if i and now + (now - begun) / i > deadline:
                run.about["stopped"] = f"time is up after {i} of {len(works)} rows"
                return
            begin(work.name)
            run.rows.append(one(work, bench, makers))
            run.about["noise"] = noise_of(run.rows)
            print(text(run.rows[-1]), flush=True)
            if out:
                run.save(out)


def one(work: Work, bench: Bench, makers: dict[str, Maker]) -> Row:
    """A row even where the work itself cannot be done."""
    try:
        if bench.clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return measure(work, bench, makers)
    except Exception as error:
        row = Row(work.name, work.pattern, work.case, NAMES[work.dtype], work.train, work.linear, 0, 0, 0.0, 0.0, [])
        row.note = said(error)
        return row


def ahead(works: list[Work], names: list[str], jobs: int, minutes: float | None) -> dict:
    """Compile first, in many processes; what is not done in time is compiled when its turn comes."""
    start = time.monotonic()
    print(f"compiling {len(works)} rows ahead with {jobs} processes", file=sys.stderr, flush=True)
    counts = compile_ahead(works, names, jobs, minutes and minutes * 60 * WARM_SHARE)
    found = counts | dict(processes=jobs, seconds=round(time.monotonic() - start, 1))
    print(f"compiled {found['done']} ({found['failed']} failed) in {found['seconds']:.0f} s", file=sys.stderr)
    return found


def processes() -> int:
    return max(1, min(14, (os.cpu_count() or 2) - 2))


def named(names: list[str] | None) -> dict[str, Maker]:
    if unknown := sorted(set(names or ()) - set(CONTENDERS)):
        raise ValueError(f"no contender {', '.join(unknown)}; there is {', '.join(CONTENDERS)}")
    return {name: make for name, make in CONTENDERS.items() if not names or name in names}


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.patterns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="turns of every contender (default: 7, without a GPU 3)")
    parser.add_argument("--minutes", type=float, help="stop before this time is up")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead (default: one a core; 0 without a GPU)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="a Chrome trace a contender; show its kernels")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON, anew after each row")
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if args.minutes is not None and args.minutes <= 0:
        parser.error("--minutes must be more than 0")
    return args, parser


if __name__ == "__main__":
    sys.exit(main())
