"""Pictures of a run of the benchmarks, as PNG: roofline, speed-up over size, memory, model steps,
block sizes.

    for name, title, png in plots(Run.load(path)): Path(f"{name}.png").write_bytes(png)

Needs matplotlib (in the extra "bench").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from benchmarks.drawing import (
    CEILING,
    CLASS_COLOURS,
    COLOURS,
    LABEL,
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
from benchmarks.figures import LARGE, SAME
from benchmarks.results import BlockRow, ModelRow, Row, Run
from benchmarks.trace import KINDS, OURS

MOST = 30  # rows of the memory plot


# Patterns.


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
    ridge = matrix / copy if matrix else high
    axes.plot(
        [low, min(ridge, high)],
        [low * copy / 1e12, min(ridge, high) * copy / 1e12],
        color=CEILING,
        lw=1.5,
    )
    axes.text(low * 1.2, low * 1.2 * copy / 1e12 * 1.6, f"copy {copy / 1e12:.3g} TB/s",
        rotation_mode="anchor",
              rotation=math.degrees(math.atan(1.6 * copy / 1e12)),
              transform_rotates_text=True)  # fmt: skip
    if matrix:
        axes.plot([ridge, high], [matrix / 1e12] * 2, color=CEILING, lw=1.5)
        axes.annotate(f"bf16 matrix product {matrix / 1e12:.3g} TFLOP/s", (high, matrix / 1e12),
            (0, 4),
                      textcoords="offset points", ha="right")  # fmt: skip
    for name in names(rows):
        points = [(row.intensity, row.of(name).rate_flops / 1e12) for row in rows
                  if row.of(name) and row.of(name).rate_flops] or [(math.nan,
                  math.nan)]  # fmt: skip
        axes.scatter(*zip(*points, strict=True), s=26, marker=MARKERS.get(name, "x"),
            color=colour(name), alpha=0.75,
                     edgecolors="none", label=name)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high),
        xlabel="operations per byte that must move",
             ylabel="TFLOP/s", title=f"Roofline: {where(run)}")  # fmt: skip
    label_patterns(axes, rows, low, high)
    axes.legend(loc="upper left")
    return png(figure)


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
        noise = max([row.noise for row in mine if row.noise is not None] or [0.0])
        axes.axhspan(1 / (1 + noise), 1 + noise, color=COLOURS["inductor"], alpha=0.15, lw=0)
        axes.axhline(1, color=COLOURS["inductor"], lw=1.2)
        for name in shown:
            for train in (False, True):
                series = sorted((size_of(row, run), row.ratio(name)) for row in mine
                                if row.train == train and row.ratio(name))  # fmt: skip
                if series:
                    axes.plot(*zip(*series, strict=True), marker=MARKERS.get(name, "x"), ms=5,
                        color=colour(name),
                              lw=0, markerfacecolor=colour(name) if train else "none",
                              alpha=0.9)  # fmt: skip
        ratios = [row.ratio(name) for row in mine for name in shown if row.ratio(name)]
        top = max([1.25, *(1.12 * ratio for ratio in ratios)])
        bottom = min([0.8, *(0.9 * ratio for ratio in ratios)])
        axes.set(
            xscale="log", title=pattern, ylim=(bottom, top), xlim=(min(sizes) / 2, max(sizes) * 2)
        )
        axes.xaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(plt.FuncFormatter(byte_words))
        axes.xaxis.set_minor_formatter(plt.NullFormatter())
    figure.supxlabel("bytes that must move")
    figure.supylabel("speed-up")
    line = plt.Line2D
    handles = [
        line([], [], marker=MARKERS.get(n, "x"), color=colour(n), lw=0, label=n) for n in shown
    ]
    handles += [line([], [], marker="o", color="#444444", lw=0, label="training"),
                line([], [], marker="o", color="#444444", lw=0, markerfacecolor="none",
                label="inference")]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), 
                  title=f"Times as fast as plain Inductor (blue; band: noise). {where(run)}")  # fmt: skip
    return png(figure)


def memory(run: Run) -> bytes | None:
    """The peak of a step and what forward keeps for backward, against plain Inductor's: the work
    that takes LARGE, and in which fusion differs, most of all first.
    """
    kinds = {
        "peak_bytes": "peak of a step beyond its arguments",
        "saved_bytes": "kept from forward to backward",
    }

    def bytes_of(row: Row, name: str, kind: str) -> int:
        return getattr(row.of(name), kind, None) or 0

    def difference(row: Row) -> float:
        return max((abs(mine / base - 1) for kind in kinds for name in ("fusion", "fusion-always")
                    if (base := bytes_of(row, "inductor", kind)) >= LARGE and (mine := bytes_of(row,
                    name, kind))),
                   default=0.0)  # fmt: skip

    rows = sorted(
        (row for row in run.rows if difference(row) > SAME), key=difference, reverse=True
    )[:MOST]
    rows = [keep(row, "inductor", "fusion", "fusion-always") for row in rows]
    kinds = {
        kind: head
        for kind, head in kinds.items()
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
            axes, rows, lambda c, kind=kind, scale=scale: (getattr(c, kind) or 0) / scale[id(c)],
            lambda row: row.name,
            lambda row, c, kind=kind: byte_words(getattr(c, kind)) if getattr(c, kind) else "",
        )  # fmt: skip
        axes.set(xlabel="plain Inductor = 1", title=head, xlim=(0, axes.get_xlim()[1] * 1.12))
        axes.axvline(1, color=COLOURS["inductor"], lw=1, zorder=0.5)
    figure.suptitle(f"Memory, where it differs by more than {SAME:.0%}: {where(run)}")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return png(figure)


def keep(row: Row, *names: str) -> Row:
    return dataclasses.replace(row, contenders=[c for c in row.contenders if c.name in names])


# Models.


def steps(run: Run) -> bytes | None:
    """Step time of each contender against plain Inductor's, annotated in milliseconds."""
    rows = [row for row in run.rows if any(c.step for c in row.contenders)]
    if not rows:
        return None
    plt = pyplot()

    def relative(row: ModelRow):
        base = row.of("inductor") if row.of("inductor") and row.of("inductor").step else next(
            c for c in row.contenders if c.step)  # fmt: skip
        return base.step.median

    scale = {id(c): relative(row) for row in rows for c in row.contenders}
    count = len(names(rows))
    figure, axes = plt.subplots(figsize=(9, 0.24 * count * len(rows) + 1.7))
    bars(
        axes, rows, lambda c: c.step.median / scale[id(c)], short_title,
        lambda row,
        c: f"{c.step.median:.4g} ms" + (f", {row.ratio(c.name):.2f}×" if row.ratio(c.name) else ""),
    )  # fmt: skip
    widest = max(c.step.median / scale[id(c)] for row in rows for c in row.contenders if c.step)
    axes.set(
        xlim=(0, widest * 1.25), xlabel="time of a step, plain Inductor = 1 (×: times as fast)"
    )
    axes.axvline(1, color=COLOURS["inductor"], lw=1, zorder=0.5)
    figure.suptitle(f"Model steps: {where(run)}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return png(figure)


def short_title(row: ModelRow) -> str:
    return f"{row.name}\n{row.mode} {row.dtype}"


def kernel_shares(run: Run) -> bytes | None:
    """Time of a step's kernels by class, before (plain Inductor) and after (fusion)."""
    rows = [row for row in run.rows if any(c.shares for c in row.contenders)]
    if not rows:
        return None
    plt = pyplot()
    lines = [(row, c) for row in rows for c in row.contenders if c.shares]
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(lines) + 1.9))
    first = {id(row): next((c for c in row.contenders if c.name == "inductor" and c.shares),
                           next(c for c in row.contenders if c.shares)).device_ms for row in rows}  # fmt: skip
    left = [0.0] * len(lines)
    for kind in KINDS:
        widths = [c.shares.get(kind, 0) * c.device_ms / first[id(row)] for row, c in lines]
        if any(widths):
            axes.barh(range(len(lines)), widths, 0.8, left=left, label=kind,
                color=CLASS_COLOURS[kind],
                      edgecolor="white", lw=0.4, hatch="///" if kind == OURS else None)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(
        range(len(lines)), [f"{row.name} {row.mode} {row.dtype}, {c.name}" for row, c in lines]
    )
    axes.set(ylim=(len(lines) - 0.5, -0.5), xlabel="time of a step's kernels, plain Inductor = 1")
    axes.bar_label(axes.containers[-1], [f"{c.device_ms:.4g} ms" for _, c in lines], **LABEL)
    axes.set_xlim(0, max(left) * 1.14)
    axes.grid(axis="y", visible=False)
    figure.suptitle(f"Where the time goes: {where(run)}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return png(figure)


def model_memory(run: Run) -> bytes | None:
    rows = [row for row in run.rows if any(c.peak_bytes for c in row.contenders)]
    if not rows:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(names(rows)) * len(rows) + 1.7))
    bars(
        axes,
        rows,
        lambda c: (c.peak_bytes or 0) / 1e9,
        short_title,
        lambda _, c: f"{(c.peak_bytes or 0) / 1e9:.3g}",
    )
    axes.set(xlabel="GB at the peak of a step, beyond weights and inputs")
    figure.suptitle(f"Memory: {where(run)}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return png(figure)


# Block sizes.


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def block_sizes(run: Run) -> Iterator[tuple[str, bytes]]:
    """A picture a piece of work: GB/s of each configuration, beside eager and plain Inductor."""
    works: dict[str, list[BlockRow]] = {}
    for row in run.rows:
        works.setdefault(row.work, []).append(row)
    for work, rows in works.items():
        kernel = [row for row in rows if row.who == "kernel" and row.rate_bytes]
        if not kernel:
            continue
        plt = pyplot()
        blocks = sorted({row.block for row in kernel})
        warps = sorted({row.warps for row in kernel})
        figure, axes = plt.subplots(figsize=(max(7, 0.62 * len(kernel) + 1.5), 4.4))
        shades = plt.get_cmap("viridis")
        width = 0.86 / len(warps)
        for i, warp in enumerate(warps):
            mine = [row for row in kernel if row.warps == warp]
            places = [blocks.index(row.block) + (i - (len(warps) - 1) / 2) * width for row in mine]
            drawn = axes.bar(places, [row.rate_bytes / 1e9 for row in mine], width * 0.94,
                label=f"num_warps {warp}",
                             color=shades(0.15 + 0.7 * i / max(1, len(warps) - 1)),
                             edgecolor=["#D55E00" if row.chosen else "none" for row in mine],
                             linewidth=2)  # fmt: skip
            axes.bar_label(
                drawn, [number(row.rate_bytes / 1e9) for row in mine], rotation=90, **LABEL
            )
        tall = max(row.rate_bytes for row in rows if row.rate_bytes) / 1e9
        for row in rows:
            if row.who != "kernel" and row.rate_bytes:
                axes.axhline(row.rate_bytes / 1e9, color=colour(row.who), ls="--", lw=1.4,
                    zorder=0.5,
                             label=f"{row.who} {number(row.rate_bytes / 1e9)}")  # fmt: skip
        chosen = " (framed: what the launcher takes)" if any(row.chosen for row in kernel) else ""
        axes.set_xticks(range(len(blocks)), blocks)
        axes.set(ylim=(0, tall * 1.2), xlabel=f"BLOCK_SIZE{chosen}", ylabel="GB/s")
        axes.grid(axis="x", visible=False)
        figure.suptitle(f"{work}: {where(run)}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        yield work, png(figure)


def plots(run: Run) -> list[tuple[str, str, bytes]]:
    """(file name, title, PNG) of every picture that the run has data for."""
    kinds = {
        "patterns": [("roofline", "Roofline", roofline),
        ("speed-up", "Speed-up over size", speed_up),
                     ("memory", "Memory", memory)],
        "models": [("steps", "Step times", steps), ("shares", "Where the time goes", kernel_shares),
                   ("memory", "Memory", model_memory)],
    }  # fmt: skip
    found = [(name, title, draw(run)) for name, title, draw in kinds.get(run.kind, ())]
    if run.kind == "block_size":
        found = [(f"block-{i}", work, data) for i, (work, data) in enumerate(block_sizes(run))]
    return [picture for picture in found if picture[2] is not None]
