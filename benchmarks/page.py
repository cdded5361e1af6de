"""One self-contained HTML page of a run: what was found, charts, tables, and how it was measured.

    python -m benchmarks.page RESULTS.json ... [--out PAGE.html]

Without --out each page is written next to its JSON. A file that holds no run is passed over; the
exit status is then 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.html_pages.document import page
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
        out = args.out or path.with_suffix(".html")
        out.write_text(page(run), encoding="utf-8")
        print(out)
    return status


if __name__ == "__main__":
    sys.exit(main())
