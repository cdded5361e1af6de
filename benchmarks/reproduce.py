"""Measure again what the pages of performance quote, and print their ratios next to the new ones.

    python -m benchmarks.reproduce --out DIR                    # at most 10 minutes on an H200
    python -m benchmarks.reproduce --out DIR --minutes 5        # fewer of the rows
    python -m benchmarks.reproduce --out DIR --part patterns    # one of the two parts
    python -m benchmarks.reproduce --out DIR --part models

This runs benchmarks.patterns on the rows that docs/performance.md and the pages of
docs/performance/ quote and then on as many others as there
is time for, and benchmarks.models on the models that they quote. Each has a process of its own and
its share of the time; --part runs one alone, where a command may not take longer. DIR gets
patterns.json, models.json and a page of each. At the end come the pages' ratios and the new ones,
which differ from one machine to another. Exit status: the largest of the commands'; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command_line.options import duration
from benchmarks.pages.quoted import ROOT
from benchmarks.pages.reproduced import ratio_lines
from benchmarks.records.runs import Run

DOCS = ROOT / "docs"
PAGES = (DOCS / "performance.md", *sorted((DOCS / "performance").glob("*.md")))
# figures of the pages, and share of the time
PARTS = {"patterns": ("rows", 0.25), "models": ("models", 0.75)}
OPTIONS = {"patterns": [], "models": ["--once", "--rounds", "5", "--exact", "none"]}


def run(argv: list[str]) -> int:
    """The exit status of a command of the benchmarks. Ctrl-C reaches it too: this waits until it
    has written its results.
    """
    print(f"\npython -m {' '.join(argv)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", *argv], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def main(argv: list[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--minutes", type=duration, default=10.0, help="for everything (default: 10)"
    )
    parser.add_argument("--part", choices=PARTS, help="one of the two alone, with all the time")
    args = parser.parse_args(argv)
    parts = [args.part] if args.part else list(PARTS)
    status, end, out = 0, time.monotonic() + args.minutes * 60, args.out.resolve()
    files = {part: out / f"{part}.json" for part in parts}
    try:
        for i, (part, file) in enumerate(files.items()):
            file.unlink(missing_ok=True)  # of an earlier run
            share = PARTS[part][1] / sum(PARTS[later][1] for later in parts[i:])  # of what is left
            minutes = max(1.0, (end - time.monotonic()) * share) / 60
            argv = ["--quoted", *map(str, pages), *OPTIONS[part], "--minutes", f"{minutes:.2f}"]
            status = max(status, run([f"benchmarks.{part}", *argv, "--out", str(file)]))
    except KeyboardInterrupt:
        status = 130
    if there := [str(file) for file in files.values() if file.exists()]:
        run(["benchmarks.page", *there])
    print(f"\n{'ratio to plain Inductor':68}{'page':>8}{'here':>8}")
    if not torch.cuda.is_available():
        print("Without a GPU the sizes are tiny: these are no ratios to compare.")
    for part, file in files.items():
        lines = ratio_lines(pages, PARTS[part][0], file)
        print("\n".join(lines))
        if torch.cuda.is_available() and (
            missing := [line for line in lines if line.endswith("-")]
        ):
            stopped = Run.load(file).about.get("stopped") if file.exists() else None
            print(
                f"  {len(missing)} of {len(lines)} {part} have no ratio here"
                + (f": {stopped}" if stopped else "")
            )
            status = max(status, 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
