"""One self-contained HTML page of a run: what was found, charts, tables, and where it comes from.

    Path("run.html").write_text(page(Run.load("run.json")))

The page needs no network. Its script only adds to it: sorting, searching and hints; without
JavaScript the tables are plain and the charts have the browser's own hints.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path

from benchmarks.html_pages import headline, model_charts, other_charts, pattern_charts
from benchmarks.html_pages.origin import origin
from benchmarks.html_pages.run_tables import (
    contender_table,
    model_contender_table,
    model_details,
    model_table,
    pattern_table,
)
from benchmarks.html_pages.size_charts import speed_over_size
from benchmarks.html_pages.tables import plain_table
from benchmarks.records.runs import Run

HERE = Path(__file__).parent
Section = tuple[str, str, Callable[[Run], str]]  # heading, how to read it, what draws it

CHARTS: dict[str, list[Section]] = {
    "patterns": [
        (
            "Speed by pattern",
            "Every mark is one site: its place is plain Inductor's time divided by fusion's. The "
            "axis is logarithmic. Right of the line at 1 fusion is faster. On the right are the "
            "geometric mean and how many of the pattern's sites are faster.",
            pattern_charts.speed_by_pattern,
        ),
        (
            "Against max-autotune",
            "The same against torch.compile with mode max-autotune-no-cudagraphs, at the sites "
            "that it was timed at.",
            lambda run: pattern_charts.speed_by_pattern(run, "max-autotune"),
        ),
        (
            "How close to the floor",
            "The floor is the shortest possible time: what moving the bytes takes at the copy "
            "bandwidth that was measured in the same run, or what the operations take at its "
            "matrix rate. At 100% there is nothing left to gain. Small sites stay far "
            "below it, because starting a kernel takes longer than its work.",
            pattern_charts.floor,
        ),
        (
            "Speed over size",
            "The same ratios over the bytes that must move, for patterns in several sizes. Both "
            "axes are logarithmic, and all charts share them.",
            speed_over_size,
        ),
        (
            "Memory",
            "Memory divided by plain Inductor's, at the sites where it differs by more than 2% "
            "of at least 50 MB, the largest differences first. Left of the line fusion needs less.",
            pattern_charts.memory,
        ),
    ],
    "models": [
        (
            "Speed of a step",
            "Eager is 1, on a logarithmic axis. The arrow leads from plain Inductor to fusion, so "
            "its length is what fusion adds; an arrow that starts left of the line belongs to a "
            "model that plain Inductor makes slower than eager.",
            model_charts.speed,
        ),
        (
            "Where the time goes",
            "GPU time of a step's kernels by kind, plain Inductor's whole step = 1. The upper bar "
            "is plain Inductor, the lower one fusion.",
            model_charts.shares,
        ),
        (
            "Memory",
            "The peak of a step beyond weights and inputs, plain Inductor = 1, on a logarithmic "
            "axis. Left of the line needs less.",
            model_charts.memory,
        ),
    ],
    "block_size": [
        (
            "Bandwidth by configuration",
            "Every mark is one number of warps; the axis is logarithmic. The table below the chart "
            "has the same figures in GB/s.",
            other_charts.block_charts,
        )
    ],
    "compare": [
        ("New revision against the base", "Left of the line is faster.", other_charts.compared)
    ],
}
TABLES: dict[str, list[Section]] = {
    "patterns": [
        (
            "Sites",
            "One line for each site. Times are medians of GPU time. An empty cell: not measured.",
            lambda run: pattern_table(run.rows),
        ),
        (
            "Contenders",
            "Every contender of every site. Call: wall time with the host. Error: the distance "
            "from the result in fp64, relative to it. Peak: what a step allocates at most. Kept: "
            "what forward keeps for backward.",
            lambda run: folded("All contenders", contender_table(run.rows)),
        ),
    ],
    "models": [
        (
            "Models",
            "One line for each model. Times are medians of wall time.",
            lambda run: model_table(run.rows),
        ),
        (
            "Contenders",
            "Kernels: GPU time of a step's kernels. First step: what it takes longer than a later "
            "one, with empty caches and with filled ones.",
            lambda run: folded("All contenders", model_contender_table(run.rows)),
        ),
        (
            "Sites and kernels",
            "What fusion replaced in each model, what it left to Inductor and why, and the longest "
            "kernels.",
            lambda run: model_details(run.rows),
        ),
    ],
}
PLAIN: list[Section] = [("Table", "", lambda run: plain_table("Rows", run.rows))]


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def top(run: Run) -> str:
    found = headline.headline(run)
    cards = "".join(
        f"<li><b>{html.escape(number)}</b> {html.escape(words)}</li>"
        for number, words in found.figures
    )
    parts = [f"<h1>{html.escape(found.title)}</h1>"]
    if not run.about.get("gpu"):
        parts.append(f'<p class="warning">{headline.CPU}</p>')
    if run.about.get("stopped"):
        stopped = html.escape(str(run.about["stopped"]))
        parts.append(f'<p class="warning">The run stopped before its end: {stopped}.</p>')
    first, *rest = found.sentences
    parts.append(f'<p class="lead">{html.escape(first)}</p>')
    parts.append(f"<p>{html.escape(' '.join(rest))}</p>" if rest else "")
    parts.append(f'<ul class="cards">{cards}</ul>' if cards else "")
    return "\n".join(part for part in parts if part)


def section(run: Run, css: str, part: Section) -> str:
    """Nothing where the run has no data for it."""
    head, how, draw = part
    if not (body := draw(run)):
        return ""
    words = f'<p class="how">{html.escape(how)}</p>\n' if how else ""
    return f'<section class="{css}">\n<h2>{html.escape(head)}</h2>\n{words}{body}\n</section>'


def page(run: Run) -> str:
    parts = [top(run)]
    parts += [section(run, "charts", part) for part in CHARTS.get(run.kind, [])]
    parts += [section(run, "tables", part) for part in TABLES.get(run.kind, PLAIN)]
    parts.append(origin(run))
    title = html.escape(headline.headline(run).title)
    style, script = ((HERE / name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>\n{script}</script></body></html>\n"
    )
