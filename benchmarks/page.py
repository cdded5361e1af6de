"""One self-contained HTML page of a run: the machine, the pictures, the tables.

    python -m benchmarks.page RESULTS.json ... [--out PAGE.html] [--png DIR]

Without --out each page is written next to its JSON. Without matplotlib the page has only the
tables, and says so; the exit status is then 1. A file that holds no run is passed over; the exit
status is then 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.pages.drawing import NoMatplotlib
from benchmarks.pages.html_page import page
from benchmarks.pages.plots import plots
from benchmarks.records.runs import Run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--out", type=Path, metavar="PAGE.html", help="where there is one results file"
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the pictures there, too")
    args = parser.parse_args(argv)
    if args.out and len(args.results) > 1:
        parser.error("--out is for a single results file")
    status = 0
    for path in args.results:
        try:
            run = Run.load(path)
        except (OSError, ValueError) as error:
            print(f"benchmarks.page: {path}: {error}", file=sys.stderr)
            status = 2
            continue
        pictures, remark = [], ""
        try:
            pictures = plots(run)
        except NoMatplotlib as error:
            remark, status = str(error), status or 1
            print(f"benchmarks.page: {error}; the page has tables only", file=sys.stderr)
        out = args.out or path.with_suffix(".html")
        out.write_text(page(run, pictures, remark))
        print(out)
        for name, _, data in pictures if args.png else ():
            args.png.mkdir(parents=True, exist_ok=True)
            (args.png / f"{path.stem}-{name}.png").write_bytes(data)
    return status


if __name__ == "__main__":
    sys.exit(main())
