"""A run of benchmarks.patterns as text, for the terminal."""

from __future__ import annotations

import statistics

from benchmarks.measure.timing import LONG_MS
from benchmarks.records.rows import OK, WRONG, Contender, Row
from benchmarks.records.runs import Run

TORCH = {"eager", "inductor", "max-autotune", "inductor-again"}  # contenders without code of ours
COLUMNS = (
    f"  {'':14}{'kernel ms':>10}{'± IQR':>7}{'mean':>10}{'std':>9}{'min':>10}{'call ms':>10}"
    f"{'GB/s':>7}{'TFLOP/s':>9}{'of floor':>9}{'ratio':>7}  "
    f"{'abs err 50, 99, 99.9 %, max':37}{'rel 99.9 %':>11}"
)
LEGEND = """\
kernel: median device time of a call, L2 flushed; call: wall time with the host; of floor: the floor
over the kernel time; ratio: plain Inductor's kernel time over the line's, + faster and - slower
beyond noise; errors against fp64"""


def amount(n: float, unit: str) -> str:
    """12.3 MB"""
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000 or prefix == "T":
            return f"{n:.3g} {prefix}{unit}"
        n /= 1000
    return ""


def heading(run: Run) -> str:
    about = run.about
    where = about["gpu"] or "CPU: these times say nothing about a GPU, the errors and the counts do"
    return (
        f"{where}; torch {about['torch']}, triton {about['triton']}, revision {about['revision']}\n"
        f"copy {amount(about['copy_bytes_s'], 'B/s')}, "
        f"bf16 matrix product {amount(about['matrix_flops_s'], 'FLOP/s')}"
        f"\n{LEGEND}\n{COLUMNS}"
    )


def text(row: Row) -> str:
    """The work with its counts, and a line a contender."""
    notes = [amount(row.bytes, "B"), amount(row.flops, "FLOP"), f"{row.intensity:.3g} FLOP/B"]
    notes += [f"floor {row.floor_ms:.4f} ms"] + (
        [f"noise {row.noise:.1%}"] if row.noise is not None else []
    )
    head = ", ".join(notes + ([row.note] if row.note else []))
    return "\n".join([f"{row.name}: {head}", *(line(row, c) for c in row.contenders)])


def line(row: Row, mine: Contender) -> str:
    words = f"  {mine.name:14}"
    if mine.kernel:
        k = mine.kernel
        words += f"{k.median:10.4f}{k.iqr / k.median:7.1%}{k.mean:10.4f}{k.std:9.4f}{k.min:10.4f}"
        words += f"{mine.call.median:10.4f}{mine.rate_bytes / 1e9:7.0f}"
        words += f"{mine.rate_flops / 1e12:9.2f}{row.floor_ms / k.median:9.0%}"
        ratio = row.ratio(mine.name)
        mark = {"faster": "+", "slower": "-"}.get(mine.verdict, " ")
        words += f"{ratio:6.2f}{mark}" if ratio else f"{'':7}"
    if mine.errors and mine.kernel:
        parts = [*mine.errors.absolute.values(), mine.errors.relative["99.9"]]
        shown = [f"{e:9.1e}" if e is not None else f"{'-':>9}" for e in parts]
        words += "  " + "".join(shown[:-1]) + f"  {shown[-1]:>11}"
    if mine.peak_bytes is not None:
        words += f"  peak {amount(mine.peak_bytes, 'B')}"
    if mine.saved_bytes is not None:
        words += f"  saved {amount(mine.saved_bytes, 'B')}"
    if mine.status != OK:
        words += f"  {mine.status.upper()}: {mine.note}"
    elif mine.declined:
        words += f"  DECLINED: {mine.declined}" + "".join(
            f"; {name} taken" for name in row.instead()
        )
    elif site := next((s for s in mine.sites if s["pattern"] == row.pattern and s["fused"]), None):
        words += f"  {site['forward']}" + (f", backward {site['backward']}" if row.train else "")
    return words.rstrip()


def noise_of(rows: list[Row]) -> dict:
    """How much twins differ: over the rows whose kernels take 20 µs, or over all where
    none does.
    """
    found = [r for r in rows if r.noise is not None]
    long = [r for r in found if r.of("inductor").kernel.median >= LONG_MS] or found
    values = [r.noise for r in long]
    return (
        dict(median=statistics.median(values), max=max(values), rows=len(values)) if values else {}
    )


def summary(run: Run) -> str:
    """The noise of the run, wins and losses, and everything that went wrong."""
    lines, found = [], run.about["noise"]
    if found:
        lines.append(
            f"noise: Inductor's code timed twice differs by {found['median']:.1%} "
            f"(median of {found['rows']} rows), {found['max']:.1%} at most"
        )
    for name in ("max-autotune", "fusion", "fusion-always"):
        mine = [c for row in run.rows if (c := row.of(name)) and c.kernel]
        counts = {v: sum(c.verdict == v for c in mine) for v in ("faster", "", "slower")}
        if mine:
            declined = sum(bool(c.declined) for c in mine)
            lines.append(
                f"{name}: faster than plain Inductor in {counts['faster']} rows, "
                f"as fast in {counts['']}, slower in {counts['slower']}"
                + (f"; declined in {declined}" if declined else "")
            )
    for row in run.rows:
        lines += [
            f"{c.status.upper()} {row.name}, {c.name}: {c.note}"
            for c in row.contenders
            if c.status != OK
        ]
        lines += [f"FAILED {row.name}: {row.note}"] if not row.contenders else []
    if stopped := run.about.get("stopped"):
        lines.append(f"stopped: {stopped}")
    return "\n".join(lines)


def honest(rows: list[Row]) -> int:
    """The exit code: 1 when a contender failed, or was wrong and is not torch's own."""
    return int(any(not row.contenders or any(map(counts, row.contenders)) for row in rows))


def counts(one: Contender) -> bool:
    return one.status not in (OK, WRONG) or (one.status == WRONG and one.name not in TORCH)
