"""Runs of benchmarks.compare, block_size, sweep and compile_kernels as Markdown."""

from __future__ import annotations

import statistics

from benchmarks.measure.timing import LONG_MS
from benchmarks.pages.markdown import number, table, where, wrapped
from benchmarks.records.runs import Run


def compared(run: Run, _: list[str]) -> str:
    """How much the two sides differ; of kernels that take 20 µs, and of all."""
    rows = [row for row in run.rows if row.ratio]
    long = [row for row in rows if row.base.median >= LONG_MS]
    text = where(run)
    for words, some in (("take at least 20 µs", long), ("were timed", rows)):
        off = sorted(abs(row.ratio - 1) for row in some)
        if off:
            within = sum(x <= 0.03 for x in off)
            text += (
                f" Of the {len(off)} kernels that {words}, {within} differ by at most 3%; median "
                f"{statistics.median(off):.1%}, largest {off[-1]:.1%}."
            )
    if missing := [row for row in run.rows if not row.ratio]:
        text += f" Not compared: {'; '.join(f'{row.work} ({row.verdict})' for row in missing)}."
    return wrapped(text)


def block_sizes(run: Run, _: list[str]) -> str:
    """GB/s of a kernel: what the launcher takes, and the best of the sweep, beside eager and plain
    Inductor.
    """
    lines = []
    for work in dict.fromkeys(row.work for row in run.rows):
        rows = [row for row in run.rows if row.work == work and row.rate_bytes]
        kernel = [row for row in rows if row.who == "kernel"]
        if not kernel:
            continue
        base = {row.who: row.rate_bytes / 1e9 for row in rows if row.who != "kernel"}
        taken, best = (
            next((row for row in kernel if row.chosen), None),
            max(kernel, key=lambda row: row.rate_bytes),
        )
        cells = [
            number(row and row.rate_bytes / 1e9, ".0f")
            + (f" ({row.block}, {row.warps})" if row else "")
            for row in (taken, best)
        ]
        lines.append(
            [work, *(number(base.get(who), ".0f") for who in ("eager", "inductor")), *cells]
        )
    return table(
        ("GB/s", "eager", "plain Inductor", "the launcher's (BLOCK, warps)", "the best"), lines
    )


def swept(run: Run, _: list[str]) -> str:
    """The fastest configuration of each piece of work of benchmarks.sweep, and the library's time
    where it has one.
    """
    lines = []
    for work in dict.fromkeys(row["work"] for row in run.rows):
        rows = [row for row in run.rows if row["work"] == work]
        best = min(
            (row for row in rows if "=" in row["config"]), key=lambda row: row["ms"], default=None
        )
        library = next((row for row in rows if "=" not in row["config"]), None)
        if best:
            base = f"{library['config']} {library['ms']:.4f}" if library else "–"
            ratio = number(library and library["ms"] / best["ms"], ".2f")
            lines.append([work, base, f"{best['ms']:.4f}", ratio, best["config"]])
    return table(("ms", "library", "the fastest", "ratio", "its configuration"), lines)


def ways(run: Run, _: list[str]) -> str:
    """The time of each way to do each piece of work of benchmarks.sweep."""
    known = list(dict.fromkeys(row["config"] for row in run.rows))
    times = {(row["work"], row["config"]): f"{row['ms']:.4f}" for row in run.rows}
    lines = [
        [work, *(times.get((work, way), "–") for way in known)]
        for work in dict.fromkeys(row["work"] for row in run.rows)
    ]
    return table(("ms", *known), lines)


def compiled(run: Run, _: list[str]) -> str:
    """What a launch of each kernel needs at most, one version of Triton beside the other."""
    versions = sorted({row["triton"] for row in run.rows})
    words = {"registers": "registers", "spilled": "bytes spilled", "shared": "shared memory"}
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in run.rows):
        by = {
            v: [row for row in run.rows if (row["kernel"], row["triton"]) == (kernel, v)]
            for v in versions
        }
        most = [
            number(max((row[what] for row in by[v]), default=None), "d")
            for what in words
            for v in versions
        ]
        lines.append([kernel, str(max(map(len, by.values()))), *most])
    return table(
        ["kernel", "launches", *(f"{word}, {v}" for word in words.values() for v in versions)],
        lines,
    )
