"""The figures in README.md and docs/, and the images in docs/images/, written from the committed
results.

    python -m benchmarks.readme           # write them
    python -m benchmarks.readme --check   # exit status 1 where a page and its results differ

A page asks for figures with a comment, and what follows it up to the closing one is written here:

    <!-- figures: summary benchmarks/results/h200.json -->
    <!-- end of figures -->

The words after "figures:" are one of these, a file, and after a colon names where only some rows
are meant:

    source FILE             a paragraph: the machine, the command
    summary FILE            a paragraph: wins and losses of a run of benchmarks.patterns
    by-pattern FILE         a table with a line a pattern: how often faster and slower, the ratios
    rows FILE: NAME; NAME   a table of its rows; with fusion.gate=always where the default gate was
                            not timed
    memory FILE             a table of the rows whose memory differs from plain Inductor's, or of
                            those that are named
    losses FILE             the rows of patterns or models in which plain Inductor or max-autotune
                            is faster
    models FILE: NAME MODE  a table of a run of benchmarks.models
    shares FILE: NAME MODE  where the time of a model's step goes, before and after
    foreign FILE            a paragraph and two tables of a run of benchmarks.foreign
    compared FILE           a paragraph: how much the sides of a run of benchmarks.compare differ
    block-sizes FILE        a table of a run of benchmarks.block_size
    swept FILE              a table of a run of benchmarks.sweep: the fastest configurations
    ways FILE               another, with the time of each configuration
    compiled FILE           a table of a run of benchmarks.compile_kernels
    ranks FILE              a table of a run of benchmarks.distributed
    sums FILE               a table of a run of benchmarks.all_reduce
    decoding FILE           a table of a run of benchmarks.tensor_parallel
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from benchmarks.html_pages.models_image import IMAGES
from benchmarks.pages.markdown import Wrong
from benchmarks.pages.quoted import ROOT, pages, written


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit status 1 where something would change",
    )
    args = parser.parse_args(argv)
    status = 0
    for page in pages(root):
        before, name = page.read_text(), page.relative_to(root)
        try:
            after = written(before, root)
        except Wrong as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        if after == before:
            continue
        if args.check:
            status = 1
            lines = difflib.unified_diff(
                before.splitlines(), after.splitlines(), str(name), "from the results", n=0
            )
            print("\n".join([*lines, "run `python -m benchmarks.readme`"]))
        else:
            page.write_text(after)
            print(f"wrote {name}")
    try:
        return max(status, images(root, args.check))
    except (OSError, ValueError, Wrong) as error:
        print(f"docs/images: {error}", file=sys.stderr)
        return 2


def images(root: Path, check: bool) -> int:
    """Write the images, or with `check` say which differ: 1 where one does."""
    status = 0
    for name, draw in IMAGES.items():
        path, after = root / name, draw(root)
        if after is None or path.exists() and path.read_text() == after:
            continue
        if check:
            status = 1
            print(f"{name} differs from its results: run `python -m benchmarks.readme`")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(after)
            print(f"wrote {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
