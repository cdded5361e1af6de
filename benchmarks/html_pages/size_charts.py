"""Speed over size: a small chart for each pattern that was measured in several sizes."""

from __future__ import annotations

import html

from benchmarks.html_pages import units
from benchmarks.html_pages.lanes import Axis, grid, key, percent
from benchmarks.html_pages.pattern_charts import by_pattern, limit
from benchmarks.pages.markdown import verdict
from benchmarks.records.rows import Row
from benchmarks.records.runs import Run

FEWEST = 4  # sizes, of a pattern that gets a chart
HEIGHT, FOOT, SIDE = 130, 18, 36


def speed_over_size(run: Run) -> str:
    """fusion's speed, plain Inductor = 1, over the bytes that must move."""
    groups = {
        pattern: group
        for pattern, group in by_pattern([r for r in run.rows if verdict(r) and r.bytes]).items()
        if len({row.bytes for row in group}) >= FEWEST
    }
    if not groups:
        return ""
    shown = [row for group in groups.values() for row in group]
    sizes, ratios = [row.bytes for row in shown], [row.ratio("fusion") for row in shown]
    across = Axis(
        min(sizes) / 1.5, max(sizes) * 1.5, lambda x: units.round_number(units.size(x)), gap=26
    )
    up = Axis(min(0.9, *ratios) * 0.97, limit(ratios) * 1.06, units.tick, line=1.0, gap=15)
    legend = key("circle", "faster", "inference") + key("square", "faster hollow", "training")
    legend += key("circle", "same", "as fast") + key("circle", "slower", "slower")
    parts = [f'<p class="legend">{legend}</p>', '<div class="panels">']
    for pattern, group in groups.items():
        parts.append(panel(across, up, pattern, group))
    return "\n".join([*parts, "</div>"])


def panel(across: Axis, up: Axis, pattern: str, rows: list[Row]) -> str:
    ticks = up.ticks()
    labels = "".join(
        f'<text x="{SIDE - 6}" y="{level(up, tick) + 4:.1f}" text-anchor="end">'
        f"{html.escape(up.form(tick))}</text>"
        for tick in ticks
    )
    lines = "".join(
        f'<line class="{"line" if tick == up.line else "grid"}" x1="0" x2="100%" '
        f'y1="{level(up, tick):.1f}" y2="{level(up, tick):.1f}"/>'
        for tick in ticks
    )
    bottom = "".join(
        f'<text x="{percent(across.at(tick))}" y="{HEIGHT + 14}" text-anchor="middle">'
        f"{html.escape(across.form(tick))}</text>"
        for tick in across.ticks()
    )
    marks = "".join(point(across, up, row) for row in rows)
    low, high = (f(row.ratio("fusion") for row in rows) for f in (min, max))
    says = f"{pattern}: {len(rows)} sites, from {units.times(low)} to {units.times(high)}"
    return (
        f'<figure><figcaption>{html.escape(pattern)}</figcaption><div class="panel">'
        f'<svg width="{SIDE}" height="{HEIGHT + FOOT}" aria-hidden="true">{labels}</svg>'
        f'<svg height="{HEIGHT + FOOT}" role="img" aria-label="{html.escape(says)}">'
        f"{grid(across, HEIGHT)}{lines}{bottom}{marks}</svg></div></figure>"
    )


def level(up: Axis, ratio: float) -> float:
    """Pixels from the top."""
    return HEIGHT * (1 - up.at(ratio) / 100)


def point(across: Axis, up: Axis, row: Row) -> str:
    ratio = row.ratio("fusion")
    x, y = percent(across.at(row.bytes)), level(up, ratio)
    words = html.escape(f"{row.name}: {units.times(ratio)}, {units.size(row.bytes)}")
    tip = f"<title>{words}</title>"
    if ratio > up.high:
        place = f'class="beyond" x="{x}" y="12" text-anchor="end"'
        return f"<text {place}>{units.times(ratio)} ↑</text>"
    if row.train:
        place = f'x="{x}" y="{y - 4:.1f}" width="8" height="8" transform="translate(-4)"'
        return f'<rect class="{verdict(row)} hollow" {place}>{tip}</rect>'
    return f'<circle class="{verdict(row)}" cx="{x}" cy="{y:.1f}" r="4">{tip}</circle>'
