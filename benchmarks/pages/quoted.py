"""The figures that stand in README.md and docs/, found and written anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages.figures import FIGURES
from benchmarks.pages.markdown import Wrong
from benchmarks.pages.model_figures import model_name
from benchmarks.records.provenance import missing
from benchmarks.records.runs import Run

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<open><!-- figures: (?P<kind>[\w-]+) (?P<file>[^\s:]+)(?::(?P<names>[^>]*?))? -->\n)"
    r"(?P<text>.*?)"
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


NAMES = {
    "rows": lambda run: [row.name for row in run.rows],
    "models": lambda run: [model_name(row) for row in run.rows],
}


def quoted(chosen: Sequence[Path], kind: str) -> dict[str, list[str]]:
    """File -> names of its rows in the figures that pages have of a kind. ValueError where they
    have none.
    """
    found: dict[str, list[str]] = {}
    for block in (b for page in chosen if page.exists() for b in BLOCK.finditer(page.read_text())):
        if block["kind"] == kind:
            names = split(block["names"]) or NAMES[kind](Run.load(ROOT / block["file"]))
            found.setdefault(block["file"], []).extend(names)
    if not found:
        raise ValueError(f"{', '.join(map(str, chosen))}: no figures of kind {kind}")
    return found


def quoted_names(chosen: Sequence[Path], kind: str) -> list[str]:
    return list(dict.fromkeys(name for names in quoted(chosen, kind).values() for name in names))


def written(text: str, root: Path = ROOT) -> str:
    """The page with its figures written anew."""
    if text.count("<!-- figures:") != len(BLOCK.findall(text)):
        raise Wrong(
            "a comment <!-- figures: ... --> is not of the form that "
            "`python -m benchmarks.readme --help` shows, or is not closed"
        )

    def block(found: re.Match) -> str:
        new = figures(found["kind"], found["file"], found["names"], root)
        return f"{found['open']}\n{new}\n{found['close']}"

    return BLOCK.sub(block, text)


def pages(root: Path = ROOT) -> list[Path]:
    """README.md, and all pages of docs/ and its folders."""
    found = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    return [page for page in found if page.exists()]
