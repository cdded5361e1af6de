"""Charts of runs of benchmarks.block_size and benchmarks.compare."""

from __future__ import annotations

import html

from benchmarks.html_pages import units
from benchmarks.html_pages.lanes import Axis, Lane, Mark, chart, key
from benchmarks.html_pages.tables import region
from benchmarks.pages.markdown import TITLES
from benchmarks.records.rows import BlockRow
from benchmarks.records.runs import Run


def works(run: Run) -> dict[str, list[BlockRow]]:
    """Piece of work -> its rows that were timed, of those with a kernel's."""
    found: dict[str, list[BlockRow]] = {}
    for row in run.rows:
        if row.rate_bytes:
            found.setdefault(row.work, []).append(row)
    return {w: rows for w, rows in found.items() if any(row.who == "kernel" for row in rows)}


def warps(count: int) -> str:
    return f"{count} warp{'s' * (count != 1)}"


def block_sizes(rows: list[BlockRow]) -> str:
    """GB/s of one piece of work: a lane for each block size, a mark for each number of warps, and
    lanes for eager and plain Inductor above them.
    """
    rates = [row.rate_bytes for row in rows]
    axis = Axis(min(rates) * 0.93, max(rates) * 1.07, round_bandwidth, gap=17)
    lanes = [
        Lane(
            TITLES.get(row.who, row.who),
            [Mark("tick", row.who, row.rate_bytes, tip=tip(row))],
            [units.bandwidth(row.rate_bytes)],
        )
        for row in rows
        if row.who != "kernel"
    ]
    kernel = [row for row in rows if row.who == "kernel"]
    for block in sorted({row.block for row in kernel}):
        mine = [row for row in kernel if row.block == block]
        marks = [
            Mark("circle", "chosen" if row.chosen else "fusion", row.rate_bytes, tip=tip(row))
            for row in sorted(mine, key=lambda row: row.chosen)  # the last is on top
        ]
        best = max(row.rate_bytes for row in mine)
        lanes.append(Lane(f"BLOCK {block:,}", marks, [units.bandwidth(best)]))
    legend = (
        key("tick", "eager", "eager")
        + key("tick", "inductor", "plain Inductor")
        + key("circle", "fusion", "the kernel, one number of warps")
        + key("circle", "chosen", "what its launcher takes")
    )
    return chart(axis, lanes, ["best"], legend, height=24)


def block_grid(rows: list[BlockRow]) -> str:
    """The same as a table: a line for each block size, a column for each number of warps."""
    kernel = {(row.block, row.warps): row for row in rows if row.who == "kernel"}
    columns, blocks = (sorted({k[i] for k in kernel}) for i in (1, 0))
    most = max(row.rate_bytes for row in rows)
    lines = ["<tr><th>BLOCK</th>" + "".join(f"<th>{warps(w)}</th>" for w in columns) + "</tr>"]
    for block in blocks:
        cells = []
        for warp in columns:
            row = kernel.get((block, warp))
            if row is None:
                cells.append("<td></td>")
                continue
            css = ' class="chosen"' if row.chosen else ""
            mixed = f' style="--share: {row.rate_bytes / most:.0%}"'
            cells.append(f"<td{css}{mixed}>{row.rate_bytes / 1e9:,.0f}</td>")
        lines.append(f"<tr><th>{block:,}</th>{''.join(cells)}</tr>")
    body = (
        f'<table class="heat"><thead>{lines[0]}</thead><tbody>{"".join(lines[1:])}</tbody></table>'
    )
    return region("GB/s by block size and warps", body)


def tip(row: BlockRow) -> str:
    what = f"BLOCK {row.block:,}, {warps(row.warps)}" if row.block else TITLES.get(row.who, row.who)
    time = f", {units.time(row.kernel.median)}" if row.kernel else ""
    chosen = ", what the launcher takes" if row.chosen else ""
    return f"{what}: {units.bandwidth(row.rate_bytes)}{time}{chosen}"


def round_bandwidth(rate: float) -> str:
    return units.round_number(units.bandwidth(rate))


def block_charts(run: Run) -> str:
    parts = []
    for work, rows in works(run).items():
        parts.append(f"<h3>{html.escape(work)}</h3>\n{block_sizes(rows)}\n{block_grid(rows)}")
    return "\n".join(parts)


def compared(run: Run) -> str:
    """New over base: a lane for each piece of work, with the bounds of its ratio."""
    rows = [row for row in run.rows if row.ratio and row.low and row.high]
    if not rows:
        return ""
    low, high = min(1.0, *(r.low for r in rows)), max(1.0, *(r.high for r in rows))
    axis = Axis(low * 0.98, high * 1.02, units.tick, line=1.0, gap=14)
    lanes = []
    for row in sorted(rows, key=lambda row: -row.ratio):
        css = row.verdict if row.verdict in ("faster", "slower") else "same"
        bounds = f"{units.times(row.low)} to {units.times(row.high)}"
        words = f"{row.work}: {units.times(row.ratio)}, {bounds}"
        marks = [
            Mark("bar", "bounds", row.low, row.high),
            Mark("circle", css, row.ratio, tip=words),
        ]
        lanes.append(Lane(row.work, marks, [units.times(row.ratio)], words))
    legend = (
        key("circle", "slower", "slower than the base")
        + key("circle", "faster", "faster")
        + key("circle", "same", "neither")
        + key("bar", "bounds", "bounds (99%)")
    )
    return chart(axis, lanes, ["new / base"], legend, height=20, css="long-names")
