"""Charts of a run of benchmarks.patterns: speed by pattern, distance to the floor, memory."""

from __future__ import annotations

import statistics

from benchmarks.html_pages import units
from benchmarks.html_pages.lanes import Axis, Lane, Mark, chart, key
from benchmarks.pages.markdown import FORCED, LARGE, SAME, TITLES, counted, verdict
from benchmarks.records.rows import Row
from benchmarks.records.runs import Run

MOST = 30  # rows of the memory chart
LEAST = 0.05  # where its axis ends
LANE = {False: -6.0, True: 6.0}  # inference above the middle of a lane, training below
MODES = key("circle", "ink", "inference (upper)") + key("square", "ink", "training (lower)")
MEMORY = {"peak_bytes": "circle", "saved_bytes": "square"}
KINDS = {"peak_bytes": "peak of a step", "saved_bytes": "kept for backward"}


def by_pattern(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.pattern, []).append(row)
    return groups


def short(row: Row) -> str:
    """The row's name without its pattern's."""
    return row.name.removeprefix(f"{row.pattern} ")


def limit(ratios: list[float]) -> float:
    """Where an axis ends: at the largest but for a few that are far beyond the others."""
    ordered = sorted(ratios)
    most = 3 * ordered[int(0.97 * (len(ordered) - 1))]
    return max(1.25, *(ratio for ratio in ordered if ratio <= most))


def speed_by_pattern(run: Run, to: str = "inductor") -> str:
    """How often faster fusion is than another: a lane for each pattern, a mark for each site."""
    rows = [row for row in run.rows if verdict(row, to=to)]
    if not rows:
        return ""
    ratios = [row.ratio("fusion", to) for row in rows]
    axis = Axis(min(0.9, *ratios, 1.0) * 0.97, limit(ratios) * 1.06, units.tick, line=1.0)
    groups = sorted(by_pattern(rows).items(), key=lambda group: -mean(group[1], to))
    lanes = [speed_lane(axis, pattern, group, to) for pattern, group in groups]
    legend = (
        key("circle", "faster", "fusion is faster")
        + key("circle", "same", "as fast")
        + key("circle", "slower", "slower")
        + MODES
        + key("tick", "ink", "geometric mean")
    )
    return chart(axis, lanes, ["mean", "faster"], legend)


def mean(rows: list[Row], to: str) -> float:
    return statistics.geometric_mean(row.ratio("fusion", to) for row in rows)


def speed_lane(axis: Axis, pattern: str, rows: list[Row], to: str) -> Lane:
    marks, beyond = [], []
    for row in rows:
        ratio = row.ratio("fusion", to)
        if ratio > axis.high:
            beyond.append(row)
            continue
        tip = (
            f"{row.name}: {units.times(ratio)}, {units.time(row.of('fusion').kernel.median)} "
            f"against {units.time(row.of(to).kernel.median)}"
        )
        shape = "square" if row.train else "circle"
        marks.append(Mark(shape, verdict(row, to=to), ratio, tip=tip, y=LANE[row.train]))
    if beyond:
        words = ", ".join(
            units.times(ratio) for ratio in sorted(r.ratio("fusion", to) for r in beyond)
        )
        at = LANE[beyond[0].train]
        marks.append(Mark("text", "beyond", axis.high, tip=f"{words} →", y=at, anchor="end"))
    average, kinds = mean(rows, to), counted(rows, to)
    tip = f"{pattern}: geometric mean of {len(rows)} sites {units.times(average)}"
    if average <= axis.high:
        marks.append(Mark("tick", "ink", average, tip=tip))
    figures = [units.times(average), f"{len(kinds['faster'])} of {len(rows)}"]
    says = (
        f"{tip}; faster at {len(kinds['faster'])}, as fast at {len(kinds['same'])}, "
        f"slower at {len(kinds['slower'])}"
    )
    return Lane(pattern, marks, figures, says)


def of_floor(row: Row, name: str) -> float:
    return row.floor_ms / row.of(name).kernel.median


def floor(run: Run) -> str:
    """The share of the floor that fusion and plain Inductor reach: a lane for each pattern."""
    rows = [row for row in run.rows if verdict(row) and row.floor_ms]
    if not rows:
        return ""
    shares = [of_floor(row, "fusion") for row in rows]
    groups = {
        pattern: [
            statistics.median(of_floor(r, who) for r in group) for who in ("inductor", "fusion")
        ]
        for pattern, group in by_pattern(rows).items()
    }
    low = min(*shares, *(before for before, _ in groups.values()))
    axis = Axis(max(0.01, low * 0.95), max(1.0, *shares) * 1.03, units.share, line=1.0)
    lanes = []
    for pattern, (before, after) in sorted(groups.items(), key=lambda group: -group[1][1]):
        marks = [
            Mark(
                "square" if row.train else "circle",
                "fusion faint",
                of_floor(row, "fusion"),
                tip=f"{row.name}: {units.share(of_floor(row, 'fusion'))} of the floor, which is "
                f"{units.time(row.floor_ms)}",
                y=LANE[row.train],
            )
            for row in by_pattern(rows)[pattern]
        ]
        marks += [
            Mark(
                "tick", "inductor", before, tip=f"{pattern}, plain Inductor: {units.share(before)}"
            ),
            Mark("tick", "fusion", after, tip=f"{pattern}, fusion: {units.share(after)}"),
        ]
        lanes.append(Lane(pattern, marks, [units.share(before), units.share(after)]))
    legend = (
        key("tick", "inductor", "plain Inductor, median")
        + key("tick", "fusion", "fusion, median")
        + key("circle", "fusion faint", "fusion, one site: inference (upper)")
        + key("square", "fusion faint", "training (lower)")
    )
    return chart(axis, lanes, ["Inductor", "fusion"], legend)


def bytes_of(row: Row, name: str, kind: str) -> int:
    return getattr(row.of(name), kind, None) or 0


def difference(row: Row) -> float:
    """The largest share by which memory of fusion differs from plain Inductor's, where that is
    LARGE.
    """
    return max(
        (
            abs(mine / base - 1)
            for kind in MEMORY
            if (base := bytes_of(row, "inductor", kind)) >= LARGE
            and (mine := bytes_of(row, "fusion", kind))
        ),
        default=0.0,
    )


def memory(run: Run) -> str:
    """What a step allocates at its peak, and what forward keeps for backward, against plain
    Inductor's: the sites that need LARGE, and in which fusion differs, most of all first.
    """
    rows = [row for row in run.rows if difference(row) > SAME]
    rows = sorted(rows, key=difference, reverse=True)[:MOST]
    if not rows:
        return ""
    found = {
        (row.name, kind): bytes_of(row, "fusion", kind) / bytes_of(row, "inductor", kind)
        for row in rows
        for kind in MEMORY
        if bytes_of(row, "inductor", kind) and bytes_of(row, "fusion", kind)
    }
    low, high = max(LEAST, min(1.0, *found.values())), max(1.0, *found.values())
    axis = Axis(low * 0.95, high * 1.05, units.tick, line=1.0, gap=14)
    lanes = []
    for row in rows:
        marks, figures = [], []
        for kind, shape in MEMORY.items():
            ratio = found.get((row.name, kind))
            if ratio is None:
                figures.append(units.NONE)
                continue
            pair = " → ".join(units.size(bytes_of(row, n, kind)) for n in ("inductor", "fusion"))
            figures.append(pair)
            css = "same" if abs(ratio - 1) <= SAME else "faster" if ratio < 1 else "slower"
            tip = f"{row.name}, {KINDS[kind]}: {pair}, {units.times(ratio)}"
            y = -4.0 if kind == "peak_bytes" else 4.0
            if ratio < axis.low:
                marks.append(Mark("text", css, axis.low, tip="← almost none", y=y, anchor="start"))
                continue
            marks.append(Mark(shape, css, ratio, tip=tip, y=y))
        lanes.append(Lane(row.name, marks, figures))
    legend = (
        key("circle", "ink", "peak of a step beyond its arguments")
        + key("square", "ink", "kept from forward to backward")
        + key("circle", "faster", "fusion needs less")
        + key("circle", "slower", "more")
    )
    return chart(axis, lanes, ["peak", "kept"], legend, css="long-names")


def titled(name: str) -> str:
    more = {FORCED: "fusion, forced", "inductor-again": "plain Inductor again"}
    return TITLES.get(name, more.get(name, name))
