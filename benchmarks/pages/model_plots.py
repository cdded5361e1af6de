"""Pictures of a run of benchmarks.models: step times, kernels by class, memory."""

from __future__ import annotations

from benchmarks.measure.trace import KINDS, OURS
from benchmarks.pages.drawing import CLASS_COLOURS, COLOURS, LABEL, bars, names, png, pyplot, where
from benchmarks.records.rows import ModelRow
from benchmarks.records.runs import Run


def steps(run: Run) -> bytes | None:
    """Step time of each contender against plain Inductor's, annotated in milliseconds."""
    rows = [row for row in run.rows if any(c.step for c in row.contenders)]
    if not rows:
        return None
    plt = pyplot()

    def relative(row: ModelRow):
        base = (
            row.of("inductor")
            if row.of("inductor") and row.of("inductor").step
            else next(c for c in row.contenders if c.step)
        )
        return base.step.median

    scale = {id(c): relative(row) for row in rows for c in row.contenders}
    count = len(names(rows))
    figure, axes = plt.subplots(figsize=(9, 0.24 * count * len(rows) + 1.7))
    bars(
        axes,
        rows,
        lambda c: c.step.median / scale[id(c)],
        short_title,
        lambda row, c: (
            f"{c.step.median:.4g} ms" + (f", {row.ratio(c.name):.2f}×" if row.ratio(c.name) else "")
        ),
    )
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
    first = {
        id(row): next(
            (c for c in row.contenders if c.name == "inductor" and c.shares),
            next(c for c in row.contenders if c.shares),
        ).device_ms
        for row in rows
    }
    left = [0.0] * len(lines)
    for kind in KINDS:
        widths = [c.shares.get(kind, 0) * c.device_ms / first[id(row)] for row, c in lines]
        if any(widths):
            axes.barh(
                range(len(lines)),
                widths,
                0.8,
                left=left,
                label=kind,
                color=CLASS_COLOURS[kind],
                edgecolor="white",
                lw=0.4,
                hatch="///" if kind == OURS else None,
            )
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
