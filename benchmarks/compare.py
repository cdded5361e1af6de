"""Two revisions of the kernels in alternation: is the change an improvement?

    python -m benchmarks.compare --base main [--only NAME ...] [--sizes SIZE ...] [--out FILE.json]

The base revision is checked out into a temporary git worktree; the working tree, uncommitted
changes included, is the new one. Each revision has a process that stays alive, and the two take
turns on the same work, timed by the benchmarks of the working tree. For each piece of work this
prints the median kernel times and new / base: the median over the rounds of the ratio of the
round's medians, with bounds by bootstrap (the 0.5th and 99.5th percentile of that median over 2000
resamplings of the rounds). A regression is a ratio whose lower bound is above 1 + tolerance. The
tolerance is 2 %, and twice that under 20 µs: two processes of one revision may differ by that much,
as `--base HEAD` in a clean tree shows. Work that the base lacks is listed as new. Exit status: 0; 1
with a regression or where the new revision fails; 2 for a request that makes no sense; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks.command_line.options import duration, output, positive
from benchmarks.pattern_runs.comparison import ROUNDS, TOLERANCE, compare_all, finish
from benchmarks.pattern_runs.contenders import HOW
from benchmarks.pattern_runs.sides import Failed, both_sides
from benchmarks.records.runs import Run, machine
from benchmarks.workloads.selection import add_arguments, selected, spread
from fusion_backend.frontends.loading import patterns


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--base", required=True, metavar="REV", help="a git revision")
    add_arguments(parser)
    contender = "what is timed of both revisions (default: fusion-always)"
    add("--contender", default="fusion-always", choices=list(HOW), help=contender)
    add("--rounds", type=positive, default=ROUNDS, help=f"default: {ROUNDS}")
    tolerance = "a ratio that passes, less 1 (default: 0.02); under 20 µs twice that"
    add("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    minutes = "stop before this time is up; every pattern has its turn first"
    add("--minutes", type=duration, help=minutes)
    add("--out", type=output, metavar="FILE", help="write the results as JSON after each row")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args, begun = arguments(argv), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    about = dict(base=args.base, tolerance=args.tolerance)
    run = Run("compare", machine(device, "benchmarks.compare") | about)
    try:
        works = selected(args, device.type == "cuda")
        works = spread(works) if args.minutes else works
        with both_sides(args.base, args.contender) as (base, new):
            compare_all(run, works, base, new, args, begun)
    except (ValueError, Failed) as error:
        print(f"python -m benchmarks.compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        where = f" in {args.out}" if args.out and run.rows else ""
        print(f"interrupted; {len(run.rows)} rows{where}")
        return 130
    run.about["seconds"] = round(time.monotonic() - begun, 1)
    if args.out:
        run.save(args.out)
    return finish(run)


if __name__ == "__main__":
    sys.exit(main())
