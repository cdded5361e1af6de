"""A chart of lanes: one axis, and below it a line of marks for each pattern, model or
configuration, with its name on the left and its figures on the right.

A lane is SVG without a view box. Places along the axis are percentages, so that the chart is as
wide as the page while the letters and marks keep their size; on a narrow screen the name and the
figures stand above the marks. Colours are classes of page.css, which has them for light and dark.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable

MOST = 33.0  # em, of the column of names
SHORT = 2.5  # percent; an arrow that is shorter has no head


@dataclasses.dataclass(frozen=True)
class Axis:
    low: float
    high: float
    form: Callable[[float], str]
    log: bool = True
    line: float | None = None  # drawn stronger: what everything is compared with
    gap: float = 10.0  # percent between two labels

    def at(self, value: float) -> float:
        """Percent of the width, no less than 0 and no more than 100."""
        low, high, value = (
            (math.log(max(x, 1e-12)) if self.log else x) for x in (self.low, self.high, value)
        )
        return min(100.0, max(0.0, 100 * (value - low) / ((high - low) or 1)))

    def ticks(self) -> list[float]:
        """Round values whose labels have room, the roundest first."""
        chosen: list[float] = [] if self.line is None else [self.line]
        for value in self.candidates():
            inside = self.low * 0.999 <= value <= self.high * 1.001
            if inside and all(abs(self.at(value) - self.at(other)) >= self.gap for other in chosen):
                chosen.append(value)
        return sorted(chosen)

    def candidates(self) -> list[float]:
        top = math.floor(math.log10(self.high))
        if not self.log:
            step = 10.0**top
            steps = [s * step for s in (1, 0.5, 0.25, 0.2) if self.high / (s * step) <= 8]
            return [i * steps[-1] for i in range(int(self.high / steps[-1]) + 1)]
        decades = range(math.floor(math.log10(self.low)), top + 1)
        near = [1 + i / n for n in (10, 20, 50, 100) for i in range(-n // 4, n // 4 + 1)]
        rounds = ((1,), (2, 5), (3, 1.5, 7), (1.2, 4, 8, 9, 6), (1.1, 1.3, 1.7))
        found = [float(f"{n}e{d}") for group in rounds for d in decades for n in group]
        return found + near * (self.high < 1.25 * self.low)


@dataclasses.dataclass(frozen=True)
class Mark:
    """`shape` is circle, square, tick, bar (from `at` to `to`), arrow (likewise) or text (`tip`
    beside `at`: "end" or "start").
    """

    shape: str
    css: str
    at: float
    to: float | None = None
    tip: str = ""
    y: float = 0.0  # from the middle of the lane, downwards
    anchor: str = "middle"


@dataclasses.dataclass(frozen=True)
class Lane:
    name: str
    marks: list[Mark]
    figures: list[str]
    says: str = ""  # the lane in words, for a reader who cannot see it
    first: bool = False  # of a group: a rule above it


def chart(
    axis: Axis,
    lanes: Iterable[Lane],
    heads: list[str],
    legend: str = "",
    height: int = 26,
    css: str = "",
) -> str:
    """`heads` stand above the figures of the lanes; `legend` is HTML."""
    lanes = list(lanes)
    longest = max((len(lane.name) for lane in lanes), default=0)
    columns = f"--figures: {len(heads)}; --name: {min(longest * 0.56 + 0.5, MOST):.1f}em"
    parts = [f'<div class="chart {css}" style="{columns}">']
    if legend:
        parts.append(f'<p class="legend">{legend}</p>')
    parts.append(row("", axis_svg(axis), heads, "lane head"))
    for lane in lanes:
        drawing = lane_svg(axis, lane, height)
        parts.append(row(lane.name, drawing, lane.figures, "lane" + " first" * lane.first))
    parts.append("</div>")
    return "\n".join(parts)


def row(name: str, drawing: str, figures: list[str], css: str) -> str:
    words = "".join(f"<span>{html.escape(figure)}</span>" for figure in figures)
    return (
        f'<div class="{css}"><span class="name">{html.escape(name)}</span>'
        f'<span class="figures">{words}</span>{drawing}</div>'
    )


def percent(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"


def axis_svg(axis: Axis) -> str:
    words = []
    for tick in axis.ticks():
        at = axis.at(tick)
        anchor = "start" if at < 4 else "end" if at > 96 else "middle"
        text = html.escape(axis.form(tick))
        words.append(f'<text x="{percent(at)}" y="13" text-anchor="{anchor}">{text}</text>')
    return f'<svg height="18" aria-hidden="true">{"".join(words)}</svg>'


def grid(axis: Axis, height: float) -> str:
    lines = []
    for tick in axis.ticks():
        css = "line" if tick == axis.line else "grid"
        at = percent(axis.at(tick))
        lines.append(f'<line class="{css}" x1="{at}" x2="{at}" y1="0" y2="{height:g}"/>')
    return "".join(lines)


def lane_svg(axis: Axis, lane: Lane, height: float) -> str:
    says = html.escape(lane.says or f"{lane.name}: {', '.join(lane.figures)}")
    marks = "".join(mark_svg(axis, mark, height / 2) for mark in lane.marks)
    return (
        f'<svg height="{height:g}" role="img" aria-label="{says}">{grid(axis, height)}{marks}</svg>'
    )


def mark_svg(axis: Axis, mark: Mark, middle: float) -> str:
    at, y = axis.at(mark.at), middle + mark.y
    x, css = percent(at), f'class="{mark.css}"'
    if mark.shape == "text":
        tip = html.escape(mark.tip)
        return f'<text {css} x="{x}" y="{y + 4:g}" text-anchor="{mark.anchor}">{tip}</text>'
    tip = f"<title>{html.escape(mark.tip)}</title>" if mark.tip else ""
    if mark.shape == "circle":
        return f'<circle {css} cx="{x}" cy="{y:g}" r="4.5">{tip}</circle>'
    if mark.shape == "square":
        place = f'x="{x}" y="{y - 4:g}" width="8" height="8" transform="translate(-4)"'
        return f"<rect {css} {place}>{tip}</rect>"
    if mark.shape == "tick":
        place = f'x="{x}" y="{y - 9:g}" width="3" height="18" transform="translate(-1.5)"'
        return f"<rect {css} {place}>{tip}</rect>"
    end = axis.at(mark.to if mark.to is not None else mark.at)
    left, width = min(at, end), abs(end - at)
    if mark.shape == "bar":
        place = f'x="{percent(left)}" y="{y - 7:g}" width="{percent(width)}" height="14"'
        return f"<rect {css} {place}>{tip}</rect>"
    turn = "" if end >= at else " rotate(180)"
    head = f'<path d="M-6 0l-7 -4v8z" transform="translate(0 {y:g}){turn}"/>'
    if width < SHORT:
        head = ""
    return (
        f'<g {css}><line x1="{x}" x2="{percent(end)}" y1="{y:g}" y2="{y:g}"/>'
        f'<svg x="{percent(end)}" overflow="visible">{head}</svg></g>'
    )


def key(shape: str, css: str, words: str) -> str:
    """An entry of a legend."""
    mark = mark_svg(Axis(0, 2, str, log=False), Mark(shape, css, 1), 8)
    if shape == "bar":
        mark = f'<rect class="{css}" x="1" y="2" width="12" height="12"/>'
    return (
        f'<span class="key"><svg width="14" height="16" aria-hidden="true">{mark}</svg>'
        f"{html.escape(words)}</span>"
    )
