"""The built-in patterns under eager, plain Inductor, Inductor max-autotune and fusion, kernel by
kernel.

    python -m benchmarks.patterns [--out FILE.json]     # the whole table
    python -m benchmarks.patterns --minutes 10     # what there is time for, every pattern first
    python -m benchmarks.patterns --only layer_norm softmax --sizes large --dtype bf16,f32 --train
    python -m benchmarks.patterns --only rms_norm --sizes rows=4096,n=5120 --contenders inductor
    python -m benchmarks.patterns --rows 'layer_norm bf16 rows=16384 n=4096 train' window=256

For each piece of work the table shows the device time (CUDA events around a call, with the L2
flushed before it and the launch queued ahead, so that the host does not show), the time of a whole
call including the host, the counted bytes and operations, the floor that follows from these and
from the ceilings measured in the same run, errors against fp64, peak memory, and what is kept for
backward. The contenders take turns in one process. Inductor's code is timed a second time under
another name: that difference is the noise. docs/benchmarks.md says how to read the table. Exit
status: 0; 1 if a contender failed or was wrong; 2 for a request that makes no sense; 130 after
Ctrl-C, which keeps what was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.command_line.options import duration, output, positive
from benchmarks.pages.pattern_text import heading, honest, summary
from benchmarks.pattern_runs.contenders import CONTENDERS
from benchmarks.pattern_runs.measuring import Bench
from benchmarks.pattern_runs.planning import ahead, measure_all, planned, processes
from benchmarks.records.runs import Run, machine
from benchmarks.workloads.selection import add_arguments
from fusion_backend.frontends.loading import patterns


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
    parser.add_argument(
        "--quoted",
        type=Path,
        nargs="+",
        metavar="PAGE.md",
        help="the rows whose figures pages give first, of the others inductor and fusion alone",
    )
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
