"""The figures in README.md and docs/, written from the committed results.

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
    rows FILE: NAME; NAME   a table of its rows; with fusion.gate=always where the default gate was not timed
    memory FILE             a table of the rows whose memory differs from plain Inductor's, or of those that are named
    losses FILE             the rows of patterns or models in which plain Inductor or max-autotune is faster
    models FILE: NAME MODE  a table of a run of benchmarks.models
    shares FILE: NAME MODE  where the time of a model's step goes, before and after
    compared FILE           a paragraph: how much the two sides of a run of benchmarks.compare differ
    block-sizes FILE        a table of a run of benchmarks.block_size
    swept FILE              a table of a run of benchmarks.sweep
    compiled FILE           a table of a run of benchmarks.compile_kernels
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from benchmarks.figures import FIGURES, Wrong, model_name
from benchmarks.provenance import missing
from benchmarks.results import Run

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(?P<open><!-- figures: (?P<kind>[\w-]+) (?P<file>[^\s:]+)(?::(?P<names>[^>]*?))? -->\n)(?P<text>.*?)"
    r"(?P<close><!-- end of figures -->)",
    re.DOTALL,
)


def figures(kind: str, file: str, names: str | None, root: Path) -> str:
    """What stands between the comments."""
    if kind not in FIGURES:
        raise Wrong(f"there are no figures of kind {kind!r}; there are {', '.join(FIGURES)}")
    try:
        run = Run.load(root / file)
    except (OSError, ValueError) as error:
        raise Wrong(f"{file}: {error}") from None
    if lost := missing(run.about.get("revision"), root):
        raise Wrong(
            f"{file} names {' and '.join(lost)}, which is no commit of this repository's history"
        )
    figure = FIGURES[kind]
    if figure.kinds and run.kind not in figure.kinds:
        wanted = " or ".join(figure.kinds)
        raise Wrong(
            f"{kind} needs a run of benchmarks.{wanted}; {file} is one of benchmarks.{run.kind}"
        )
    return figure.write(run, split(names))


def split(names: str | None) -> list[str]:
    return [" ".join(name.split()) for name in (names or "").split(";") if name.strip()]


NAMES = {"rows": lambda run: [row.name for row in run.rows],
         "models": lambda run: [model_name(row) for row in run.rows]}  # fmt: skip


def quoted(page: Path, kind: str) -> dict[str, list[str]]:
    """File -> names of its rows in the figures that a page has of a kind. ValueError where it has
    none.
    """
    found: dict[str, list[str]] = {}
    for block in BLOCK.finditer(page.read_text()) if page.exists() else ():
        if block["kind"] == kind:
            names = split(block["names"]) or NAMES[kind](Run.load(page.parent / block["file"]))
            found.setdefault(block["file"], []).extend(names)
    if not found:
        raise ValueError(f"{page} has no figures of kind {kind}")
    return found


def quoted_names(page: Path, kind: str) -> list[str]:
    return [name for names in quoted(page, kind).values() for name in names]


def written(text: str, root: Path = ROOT) -> str:
    """The page with its figures written anew."""
    if text.count("<!-- figures:") != len(BLOCK.findall(text)):
        raise Wrong(
            "a comment <!-- figures: ... --> is not of the form that benchmarks/readme.py knows, or not closed"
        )

    def block(found: re.Match) -> str:
        new = figures(found["kind"], found["file"], found["names"], root)
        return f"{found['open']}\n{new}\n{found['close']}"

    return BLOCK.sub(block, text)


def pages(root: Path = ROOT) -> list[Path]:
    return [
        page
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        if page.exists()
    ]


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
    return status


if __name__ == "__main__":
    sys.exit(main())
