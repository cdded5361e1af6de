"""Charts of a run of benchmarks.models: speed, where the time goes, memory."""

from __future__ import annotations

import re

from benchmarks.html_pages import units
from benchmarks.html_pages.lanes import Axis, Lane, Mark, chart, key
from benchmarks.measure.trace import KINDS
from benchmarks.pages.markdown import AUTOTUNE, TITLES
from benchmarks.pages.model_figures import model_name
from benchmarks.records.rows import ModelRow
from benchmarks.records.runs import Run

FAR = 0.25, 4.0  # memory, plain Inductor = 1: what is further away is a word at the axis' end
WHO = {"inductor": "plain Inductor", "fusion": "fusion"}


def lane_name(row: ModelRow) -> str:
    """gpt2 train, with what is unusual about it."""
    how = [word for word in ("attention eager", "dropout on") if word in row.title]
    return ", ".join([model_name(row), *how])


def speed(run: Run) -> str:
    """The speed of each way to run a model, eager = 1: the arrow leads from plain Inductor to
    fusion, so that on this logarithmic axis its length is the ratio of the two.
    """
    rows = [row for row in run.rows if row.ratio("fusion") and row.ratio("fusion", "eager")]
    if not rows:
        return ""
    found = [row.ratio(who, "eager") for row in rows for who in (*WHO, AUTOTUNE)]
    found = [ratio for ratio in found if ratio]
    axis = Axis(min(0.9, *found) * 0.94, max(1.1, *found) * 1.06, units.tick, line=1.0)
    lanes = [speed_lane(row) for row in rows]
    legend = key("tick", "line", "eager = 1") + key("circle", "inductor", "plain Inductor")
    if any(row.ratio(AUTOTUNE, "eager") for row in rows):
        legend += key("circle", "autotune", AUTOTUNE)
    legend += key("circle", "fusion", "fusion")
    return chart(axis, lanes, ["to Inductor", "to eager"], legend, height=24)


def speed_lane(row: ModelRow) -> Lane:
    ratios = {who: row.ratio(who, "eager") for who in ("inductor", AUTOTUNE, "fusion")}
    marks = [Mark("arrow", "arrow", ratios["inductor"], ratios["fusion"])]
    for who, css in (("inductor", "inductor"), (AUTOTUNE, "autotune"), ("fusion", "fusion")):
        if ratios[who]:
            tip = (
                f"{row.title}, {TITLES.get(who, who)}: {units.time(row.of(who).step.median)}, "
                f"{units.times(ratios[who])} eager's {units.time(row.of('eager').step.median)}"
            )
            marks.append(Mark("circle", css, ratios[who], tip=tip))
    figures = [units.times(row.ratio("fusion")), units.times(ratios["fusion"])]
    says = (
        f"{lane_name(row)}: plain Inductor {units.times(ratios['inductor'])} eager, fusion "
        f"{figures[1]} eager and {figures[0]} plain Inductor"
    )
    return Lane(lane_name(row), marks, figures, says)


def css_of(kind: str) -> str:
    return "kind-" + re.sub(r"\W+", "-", kind)


def shares(run: Run) -> str:
    """Time of a step's kernels by class, before (plain Inductor) and after (fusion)."""
    rows = [
        row
        for row in run.rows
        if all((c := row.of(who)) and c.shares and c.device_ms for who in WHO)
    ]
    if not rows:
        return ""
    most = max(row.of("fusion").device_ms / row.of("inductor").device_ms for row in rows)
    axis = Axis(
        0, max(1.0, most) * 1.01, lambda x: units.tick(x) if x else "0", log=False, line=1.0
    )
    lanes = [share_lane(row, who) for row in rows for who in WHO]
    kinds = [
        kind for kind in KINDS if any(row.of(who).shares.get(kind) for row in rows for who in WHO)
    ]
    legend = "".join(
        key("bar", css_of(kind), "fusion's own kernels" if kind == "ours" else kind)
        for kind in kinds
    )
    return chart(axis, lanes, ["kernels"], legend, height=20, css="stacked")


def share_lane(row: ModelRow, who: str) -> Lane:
    one, whole = row.of(who), row.of("inductor").device_ms
    marks, left = [], 0.0
    for kind in KINDS:
        part = one.shares.get(kind, 0.0) * one.device_ms
        if part:
            took = f"{units.time(part)}, {units.share(one.shares[kind])}"
            tip = f"{lane_name(row)}, {WHO[who]}, {kind}: {took}"
            marks.append(Mark("bar", css_of(kind), left / whole, (left + part) / whole, tip))
            left += part
    says = f"{lane_name(row)}, {WHO[who]}: " + ", ".join(
        f"{kind} {units.share(value)}" for kind, value in one.shares.items()
    )
    name = lane_name(row) + ": Inductor" if who == "inductor" else "fusion"
    return Lane(name, marks, [units.time(one.device_ms)], says, first=who == "inductor")


def memory(run: Run) -> str:
    """The peak of a step beyond weights and inputs, plain Inductor = 1."""
    rows = [row for row in run.rows if all((c := row.of(w)) and c.peak_bytes for w in WHO)]
    if not rows:
        return ""
    found = [peak(row, "fusion") for row in rows] + [r for r in map(eager_peak, rows) if r]
    found = [ratio for ratio in found if FAR[0] <= ratio <= FAR[1]]
    axis = Axis(min(1.0, *found) * 0.95, max(1.0, *found) * 1.05, units.tick, line=1.0)
    lanes = [memory_lane(axis, row) for row in rows]
    legend = (
        key("square", "eager", "eager")
        + key("circle", "inductor", "plain Inductor")
        + key("circle", "fusion", "fusion")
    )
    return chart(axis, lanes, ["Inductor", "fusion"], legend, height=22)


def peak(row: ModelRow, who: str) -> float:
    """Plain Inductor = 1."""
    return row.of(who).peak_bytes / row.of("inductor").peak_bytes


def eager_peak(row: ModelRow) -> float | None:
    eager = row.of("eager")
    return peak(row, "eager") if eager and eager.peak_bytes else None


def memory_lane(axis: Axis, row: ModelRow) -> Lane:
    marks = []
    for who, shape in (("eager", "square"), ("inductor", "circle"), ("fusion", "circle")):
        if who == "eager" and not eager_peak(row):
            continue
        ratio, words = peak(row, who), TITLES.get(who, who)
        tip = f"{lane_name(row)}, {words}: {units.size(row.of(who).peak_bytes)}"
        if ratio < axis.low:
            text = f"← {words} {units.times(ratio)}"
            marks.append(Mark("text", who, axis.low, tip=text, anchor="start"))
        elif ratio > axis.high:
            text = f"{words} {units.times(ratio)} →"
            marks.append(Mark("text", who, axis.high, tip=text, anchor="end"))
        else:
            marks.append(Mark(shape, who, ratio, tip=f"{tip}, {units.times(ratio)}"))
    return Lane(lane_name(row), marks, [units.size(row.of(who).peak_bytes) for who in WHO])
