"""One self-contained HTML page of a run: the machine, the pictures, the tables."""

from __future__ import annotations

import base64
import html

from benchmarks.pages.html_tables import about, model_table, pattern_table, plain_table
from benchmarks.records.runs import Run

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em;
  color: #222 }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd;
  font-variant-numeric: tabular-nums }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left }
th { border-bottom: 2px solid #888 }
tr.first td { border-top: 2px solid #bbb }
.bad { color: #b00020; font-weight: 600 }
pre, .wide { overflow-x: auto }
"""
TITLES = {
    "patterns": "Patterns",
    "models": "Whole models",
    "block_size": "Block sizes",
    "compare": "Two commits",
    "sweep": "Configurations",
}


def page(run: Run, pictures: list[tuple[str, str, bytes]], remark: str = "") -> str:
    title = f"{TITLES.get(run.kind, run.kind)}: {run.about.get('gpu') or 'CPU'}"
    parts = [f"<h1>{html.escape(title)}</h1>", about(run)]
    if not run.about.get("gpu"):
        parts.append(
            "<p>Measured on a CPU: times say nothing about a GPU; errors and sites do.</p>"
        )
    if remark:
        parts.append(f'<p class="bad">{html.escape(remark)}</p>')
    for _, head, data in pictures:
        coded = base64.b64encode(data).decode()
        head = html.escape(head)
        image = f'<img alt="{head}" src="data:image/png;base64,{coded}">'
        parts.append(f"<h2>{head}</h2>\n{image}")
    parts.append("<h2>Table</h2>")
    kinds = {"patterns": pattern_table, "models": model_table}
    parts.append(kinds.get(run.kind, plain_table)(run.rows))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
