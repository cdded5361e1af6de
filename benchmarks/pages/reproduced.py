"""The ratios that pages quote, next to those of new runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages.model_figures import model_name
from benchmarks.pages.pattern_figures import ours
from benchmarks.pages.quoted import ROOT, quoted
from benchmarks.records.runs import Run


def ratios(run: Run) -> dict[str, float | None]:
    """Name of each row -> plain Inductor's time over ours."""
    if run.kind == "models":
        return {model_name(row): row.ratio("fusion") for row in run.rows}
    return {row.name: row.ratio(ours(row)) for row in run.rows}


def ratio_lines(pages: Sequence[Path], kind: str, file: Path) -> list[str]:
    """A line for each row that pages quote: their ratio and the new one."""
    here = ratios(Run.load(file)) if file.exists() else {}
    lines = []
    for committed, names in quoted(pages, kind).items():
        said = ratios(Run.load(ROOT / committed))
        for name in names:
            was, now = (f"{x:.2f}" if x else "-" for x in (said.get(name), here.get(name)))
            lines.append(f"  {name:66}{was:>8}{now:>8}")
    return lines
