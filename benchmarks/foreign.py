"""Code that was not written for this project: is it ever slower with our kernels?

    python -m benchmarks.foreign --out run.json                  # the whole set, fresh caches
    python -m benchmarks.foreign --minutes 9 --shard 1/2 --out run.json      # half of it
    python -m benchmarks.foreign --minutes 9 --add --out run.json            # what the file lacks
    python -m benchmarks.foreign --only 'resnet.*train|gelu' --gate always
    python -m benchmarks.foreign --option fusion.limit=1 --processes 4
    python -m benchmarks.foreign --read a.json b.json --markdown table.md    # measures nothing

Each graph of benchmarks/foreign_code/ is compiled by plain Inductor and by fusion in a process of
its own, with empty caches. It is compared with fp64: outputs and, in training, gradients may not be
further off than both Inductor's and eager's. Then both are timed in turns, each with a twin: the
same code, whose kernels Inductor has tuned once more. Of either, the better of the two counts,
because tuning sometimes chooses badly, and the twins of plain Inductor show the noise. Many
processes compile at once; whoever times is alone on the GPU. Sizes are tiny on a CPU, where times
mean nothing. Exit status: 0; 1 when a graph went wrong or is slower than 0.98 beyond its noise; 2
when the arguments make no sense; 130 after Ctrl-C. What was measured until then is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.command_line.options import duration, output, positive
from benchmarks.foreign_code.problems import SIZES, Graph
from benchmarks.foreign_runs import request
from benchmarks.foreign_runs.measuring import How
from benchmarks.foreign_runs.rows import GraphRow
from benchmarks.foreign_runs.running import Runner, before, together, until
from benchmarks.foreign_runs.summary import line, markdown, status, summary, text
from benchmarks.records.runs import Run, machine


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foreign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_graphs(parser.add_argument)
    add_contenders(parser.add_argument)
    add_files(parser.add_argument)
    args = parser.parse_args(argv)
    if args.add and not args.out:
        parser.error("--add keeps what the file has: give --out")
    if args.warm and args.apart:
        parser.error("--apart empties the caches that --warm keeps")
    return args, parser


def add_graphs(add) -> None:
    add("--only", metavar="REGEX", help="graphs whose name, family or source it matches")
    add("--shard", type=request.shard, default=(1, 1), metavar="I/N", help="every Nth of them")
    add("--list", action="store_true", help="print the graphs and measure nothing")
    add("--size", choices=SIZES, help="default: full on a GPU, tiny on a CPU")


def add_contenders(add) -> None:
    add("--gate", default="auto", help="the option fusion.gate (default: auto)")
    more = "another option of the backend, such as fusion.skip=softmax"
    add(
        "--option",
        type=request.option,
        action="append",
        default=[],
        metavar="fusion.X=Y",
        help=more,
    )
    warm = "use the caches of the environment, instead of empty ones for each graph"
    add("--warm", action="store_true", help=warm)
    apart = "a cache for each contender: compile times compare, tuning may differ by chance"
    add("--apart", action="store_true", help=apart)
    add("--max-autotune", action="store_true", help="one more contender, which compiles slowly")
    add("--rounds", type=positive, default=7, metavar="N", help="turns of every contender")
    jobs = "at a time (default: one a core but for two, at most 14; 1 without a GPU)"
    add("--processes", type=positive, metavar="N", help=jobs)
    limit = "seconds that a graph may take, without waiting for the GPU (default: 180)"
    add("--limit", type=duration, default=180, metavar="S", help=limit)
    add("--minutes", type=duration, help="begin no graph after this time")


def add_files(add) -> None:
    add("--out", type=output, metavar="FILE", help="write the results as JSON after each graph")
    add("--add", action="store_true", help="keep the rows of FILE, and measure what it lacks")
    add("--markdown", type=output, metavar="FILE", help="write summary and table as Markdown")
    only = "measure nothing: the summary of these files together, and with --out one file of them"
    add("--read", type=Path, nargs="+", metavar="FILE", help=only)


def main(argv: list[str] | None = None) -> int:
    begun = time.monotonic()
    args, parser = arguments(argv)
    try:
        found = request.selected(args.only, args.shard)
        if args.list:
            return show_list(found)
        if args.read:
            run = together(args.read)
            if args.out:
                run.save(args.out)
            return finish(run.rows, args.markdown)
        options = request.options(args.gate, args.option)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        size = args.size or ("full" if device.type == "cuda" else "tiny")
        args.processes = args.processes or request.processes(device.type == "cuda")
        about = machine(device, "benchmarks.foreign")
        about |= dict(
            options=options, size=size, warm=args.warm, apart=args.apart, processes=args.processes
        )
        how = How(size, options, args.rounds, args.apart, args.warm, args.max_autotune)
        run = Run("foreign", about, before(args.out, about) if args.add else [])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    known = {row.name for row in run.rows}
    wanted = {name: graph for name, graph in found.items() if name not in known}
    print(f"{run.about['gpu'] or 'CPU: the times below mean nothing'}, torch {torch.__version__}")
    try:
        runner = Runner(run, how, device, args, show)
        runner.measure(wanted, until(args.minutes))
    except KeyboardInterrupt:
        run.about["stopped"] = "by Ctrl-C"
    run.about["seconds"] = round(time.monotonic() - begun, 1)
    if args.out and run.rows:
        run.save(args.out)
    if stopped := run.about.get("stopped"):
        print(f"stopped: {stopped}", file=sys.stderr)
    code = finish(run.rows, args.markdown)
    return 130 if stopped == "by Ctrl-C" else code


def show(row: GraphRow, done: int, of: int) -> None:
    print(f"{done:3}/{of} {line(row)}", flush=True)


def show_list(found: dict[str, Graph]) -> int:
    for name, graph in found.items():
        print(f"{name:48} {graph.problem.family:18} {graph.problem.source}")
    problems = len({graph.problem.name for graph in found.values()})
    print(f"{len(found)} graphs of {problems} problems")
    return 0


def finish(rows: list[GraphRow], page: Path | None) -> int:
    """Print the summary and write the page; the exit status."""
    print(f"\n{text(summary(rows))}")
    if page:
        page.write_text(markdown(rows))
    return status(rows)


if __name__ == "__main__":
    sys.exit(main())
