"""Pictures of a run of benchmarks.patterns: roofline, speed-up over size, memory."""

from __future__ import annotations

import dataclasses
import itertools
import math

from benchmarks.pages.drawing import (
    CEILING,
    COLOURS,
    MARKERS,
    bars,
    byte_words,
    colour,
    names,
    panels,
    png,
    pyplot,
    where,
)
from benchmarks.pages.markdown import LARGE, SAME
from benchmarks.records.rows import Row
from benchmarks.records.runs import Run

MOST = 30  # rows of the memory plot
MEMORY = {
    "peak_bytes": "peak of a step beyond its arguments",
    "saved_bytes": "kept from forward to backward",
}


def spread_apart(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places moved as little as needed to be `gap` apart and, where there is room, within
    low and high.
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap if moved else low))
    if moved and moved[-1] > high:
        moved[-1] = high
        for i in range(len(moved) - 2, -1, -1):
            moved[i] = min(moved[i], moved[i + 1] - gap)
    return moved


def roofline(run: Run) -> bytes | None:
    """Operations a second over operations a byte, under the ceilings that the same run measured."""
    copy, matrix = run.about.get("copy_bytes_s"), run.about.get("matrix_flops_s")
    rows = [row for row in run.rows if row.intensity and any(c.rate_flops for c in row.contenders)]
    if not rows or not copy:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 6.5))
    low, high = min(row.intensity for row in rows) / 2, max(row.intensity for row in rows) * 3
    if matrix:
        high = max(high, 4 * matrix / copy)
    draw_ceilings(axes, low, high, copy, matrix)
    for name in names(rows):
        points = [
            (row.intensity, row.of(name).rate_flops / 1e12)
            for row in rows
            if row.of(name) and row.of(name).rate_flops
        ] or [(math.nan, math.nan)]
        axes.scatter(
            *zip(*points, strict=True),
            s=26,
            marker=MARKERS.get(name, "x"),
            color=colour(name),
            alpha=0.75,
            edgecolors="none",
            label=name,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="operations per byte that must move",
        ylabel="TFLOP/s",
        title=f"Roofline: {where(run)}",
    )
    label_patterns(axes, rows, low, high)
    axes.legend(loc="upper left")
    return png(figure)


def draw_ceilings(axes, low: float, high: float, copy: float, matrix: float | None) -> None:
    """The lines of the copy bandwidth (bytes a second) and the matrix rate (operations a second)
    between two intensities.
    """
    ridge = matrix / copy if matrix else high
    axes.plot(
        [low, min(ridge, high)],
        [low * copy / 1e12, min(ridge, high) * copy / 1e12],
        color=CEILING,
        lw=1.5,
    )
    axes.text(
        low * 1.2,
        low * 1.2 * copy / 1e12 * 1.6,
        f"copy {copy / 1e12:.3g} TB/s",
        rotation_mode="anchor",
        rotation=math.degrees(math.atan(1.6 * copy / 1e12)),
        transform_rotates_text=True,
    )
    if matrix:
        axes.plot([ridge, high], [matrix / 1e12] * 2, color=CEILING, lw=1.5)
        axes.annotate(
            f"bf16 matrix product {matrix / 1e12:.3g} TFLOP/s",
            (high, matrix / 1e12),
            (0, 4),
            textcoords="offset points",
            ha="right",
        )


def label_patterns(axes, rows: list[Row], low: float, high: float) -> None:
    """Each pattern's name above the axis, with a line up to its slowest point at its median
    intensity.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.pattern, []).append(row)
    middle = {
        p: sorted(math.log10(r.intensity) for r in group)[len(group) // 2]
        for p, group in groups.items()
    }
    order = sorted(groups, key=middle.get)
    left, right = math.log10(low), math.log10(high)
    gap = (right - left) / 46
    places = spread_apart([middle[p] for p in order], gap, left + gap, right - gap)
    bottom = min(c.rate_flops for row in rows for c in row.contenders if c.rate_flops) / 1e12
    top = axes.get_ylim()[1]
    room = (math.log10(top) - math.log10(bottom)) * 0.48
    axes.set_ylim(bottom / 10**room, top * 1.3)
    end = bottom / 10 ** (0.25 * room)
    for pattern, place in zip(order, places, strict=True):
        axes.text(10**place, end / 1.1, pattern, rotation=90, ha="center", va="top", fontsize=7.5)
        at = 10 ** middle[pattern]
        slowest = (
            min(c.rate_flops for r in groups[pattern] for c in r.contenders if c.rate_flops) / 1e12
        )
        axes.plot(
            [10**place, at, at],
            [end, bottom / 10 ** (0.08 * room), slowest],
            color="#bbbbbb",
            lw=0.6,
            zorder=0,
        )


def size_of(row: Row, run: Run) -> float:
    """Bytes that the work must move; of runs that did not count them, what the floor stands for."""
    return row.bytes or row.floor_ms / 1e3 * (run.about.get("copy_bytes_s") or 1e12)


def speed_up(run: Run) -> bytes | None:
    """Plain Inductor's time over each contender's, a panel a pattern, over the size."""
    rows = [row for row in run.rows if row.ratio("inductor")]
    if not rows:
        return None
    plt = pyplot()
    patterns = list(dict.fromkeys(row.pattern for row in rows))
    shown = [name for name in names(rows) if name not in ("inductor", "eager")]
    sizes = [size_of(row, run) for row in rows]
    figure, grid = panels(plt, len(patterns), 3.6, 2.6)
    for pattern, axes in zip(patterns, grid, strict=True):
        mine = [row for row in rows if row.pattern == pattern]
        draw_speed_up(axes, run, mine, shown)
        axes.set(title=pattern, xlim=(min(sizes) / 2, max(sizes) * 2))
        axes.xaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(plt.FuncFormatter(byte_words))
        axes.xaxis.set_minor_formatter(plt.NullFormatter())
    figure.supxlabel("bytes that must move")
    figure.supylabel("speed-up")
    line = plt.Line2D
    handles = [
        line([], [], marker=MARKERS.get(n, "x"), color=colour(n), lw=0, label=n) for n in shown
    ]
    handles += [
        line([], [], marker="o", color="#444444", lw=0, label="training"),
        line([], [], marker="o", color="#444444", lw=0, markerfacecolor="none", label="inference"),
    ]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=len(handles),
        title=f"Times as fast as plain Inductor (blue; band: noise). {where(run)}",
    )
    return png(figure)


def draw_speed_up(axes, run: Run, rows: list[Row], shown: list[str]) -> None:
    """The rows of a pattern: a marker for each contender in `shown`, filled for training."""
    noise = max([row.noise for row in rows if row.noise is not None] or [0.0])
    axes.axhspan(1 / (1 + noise), 1 + noise, color=COLOURS["inductor"], alpha=0.15, lw=0)
    axes.axhline(1, color=COLOURS["inductor"], lw=1.2)
    for name, train in itertools.product(shown, (False, True)):
        series = sorted(
            (size_of(row, run), row.ratio(name))
            for row in rows
            if row.train == train and row.ratio(name)
        )
        if series:
            axes.plot(
                *zip(*series, strict=True),
                marker=MARKERS.get(name, "x"),
                ms=5,
                color=colour(name),
                lw=0,
                markerfacecolor=colour(name) if train else "none",
                alpha=0.9,
            )
    ratios = [row.ratio(name) for row in rows for name in shown if row.ratio(name)]
    top = max([1.25, *(1.12 * ratio for ratio in ratios)])
    bottom = min([0.8, *(0.9 * ratio for ratio in ratios)])
    axes.set(xscale="log", ylim=(bottom, top))


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
            for name in ("fusion", "fusion-always")
            if (base := bytes_of(row, "inductor", kind)) >= LARGE
            and (mine := bytes_of(row, name, kind))
        ),
        default=0.0,
    )


def memory(run: Run) -> bytes | None:
    """The peak of a step and what forward keeps for backward, against plain Inductor's: the work
    that takes LARGE, and in which fusion differs, most of all first.
    """
    rows = sorted(
        (row for row in run.rows if difference(row) > SAME), key=difference, reverse=True
    )[:MOST]
    rows = [keep(row, "inductor", "fusion", "fusion-always") for row in rows]
    kinds = {
        kind: head
        for kind, head in MEMORY.items()
        if any(bytes_of(row, "inductor", kind) for row in rows)
    }
    if not rows:
        return None
    plt = pyplot()
    size = (5.2 * len(kinds) + 2, 0.16 * len(names(rows)) * len(rows) + 1.8)
    figure, grid = plt.subplots(1, len(kinds), figsize=size, sharey=True, squeeze=False)
    for (kind, head), axes in zip(kinds.items(), grid.flat, strict=True):
        scale = {
            id(c): bytes_of(row, "inductor", kind) or 1 for row in rows for c in row.contenders
        }
        bars(
            axes,
            rows,
            lambda c, kind=kind, scale=scale: (getattr(c, kind) or 0) / scale[id(c)],
            lambda row: row.name,
            lambda row, c, kind=kind: byte_words(getattr(c, kind)) if getattr(c, kind) else "",
        )
        axes.set(xlabel="plain Inductor = 1", title=head, xlim=(0, axes.get_xlim()[1] * 1.12))
        axes.axvline(1, color=COLOURS["inductor"], lw=1, zorder=0.5)
    figure.suptitle(f"Memory, where it differs by more than {SAME:.0%}: {where(run)}")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return png(figure)


def keep(row: Row, *names: str) -> Row:
    return dataclasses.replace(row, contenders=[c for c in row.contenders if c.name in names])
