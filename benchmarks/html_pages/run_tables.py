"""The tables of runs of benchmarks.patterns and benchmarks.models."""

from __future__ import annotations

import html

from benchmarks.html_pages import units
from benchmarks.html_pages.pattern_charts import by_pattern, titled
from benchmarks.html_pages.tables import (
    EMPTY,
    Cell,
    error,
    micro,
    milli,
    number,
    ratio,
    share,
    size,
    status,
    table,
)
from benchmarks.measure.trace import KINDS
from benchmarks.pages.markdown import AUTOTUNE, verdict
from benchmarks.pages.model_figures import model_name
from benchmarks.pages.model_text import sites
from benchmarks.pages.pattern_figures import declined, ours
from benchmarks.records.rows import OK, ModelRow, Row

WORDS = {"faster": "faster", "same": "as fast", "slower": "slower", "": "not compared"}


def result(row: Row | ModelRow) -> Cell:
    found = verdict(row)
    if isinstance(row, Row) and found and declined(row):
        return Cell("as fast (declined)", css="same")
    if not found:
        bad = next((one for one in row.contenders if one.status != OK), None)
        return Cell(
            f"not compared: {titled(bad.name)} {bad.status}" if bad else WORDS[""], css="bad"
        )
    return Cell(WORDS[found], css=found)


def pattern_table(rows: list[Row]) -> str:
    """A line for each site."""
    others = [who for who in ("inductor", AUTOTUNE, "eager") if any(row.of(who) for row in rows)]
    heads = ["site", "result", "ratio", *(f"{titled(who)}, µs" for who in ("fusion", *others))]
    heads += [
        "ratio to max-autotune",
        "of the floor",
        "noise",
        "moves at least",
        "computes",
        "remark",
    ]
    lines = []
    for row in (row for group in by_pattern(rows).values() for row in group):
        who = ours(row)
        one = row.of(who)
        lines.append(
            [
                row.name,
                result(row),
                ratio(row.ratio(who) if verdict(row, who) else None),
                *(micro(c.kernel if (c := row.of(name)) else None) for name in (who, *others)),
                ratio(row.ratio(who, AUTOTUNE) if verdict(row, who, AUTOTUNE) else None),
                share(row.floor_ms / one.kernel.median if one and one.kernel else None),
                number(row.noise, f"{row.noise:.1%}" if row.noise is not None else ""),
                size(row.bytes or None),
                number(row.flops or None, units.operations(row.flops)),
                row.note,
            ]
        )
    return table("Sites", *without_empty(heads, lines), words=2)


def without_empty(heads: list[str], lines: list[list]) -> tuple[list[str], list[list]]:
    """Without the columns that no line has anything in."""
    keep = [
        i for i in range(len(heads)) if not i or any(line[i] and line[i] != EMPTY for line in lines)
    ]
    return [heads[i] for i in keep], [[line[i] for i in keep] for line in lines]


def contender_table(rows: list[Row]) -> str:
    """A line for each contender of each site."""
    heads = ["site", "contender", "kernel, µs", "IQR", "min, µs", "call, µs", "ratio", "GB/s"]
    heads += ["TFLOP/s", "of the floor", "error", "peak", "kept", "compile, s", "remark"]
    lines = []
    for row in rows:
        for one in row.contenders:
            k = one.kernel
            iqr = k.iqr / k.median if k and k.q25 is not None else None
            lines.append(
                [
                    row.name,
                    titled(one.name),
                    micro(k),
                    number(iqr, f"{iqr:.1%}" if iqr is not None else ""),
                    number(k and k.min, units.digits(k.min * 1e3) if k else ""),
                    micro(one.call),
                    ratio(row.ratio(one.name)),
                    number(one.rate_bytes, f"{(one.rate_bytes or 0) / 1e9:,.0f}"),
                    number(one.rate_flops, units.digits((one.rate_flops or 0) / 1e12)),
                    share(row.floor_ms / k.median if k else None),
                    error(one.errors and one.errors.distance),
                    size(one.peak_bytes),
                    size(one.saved_bytes),
                    number(one.compile_s, f"{one.compile_s or 0:.1f}"),
                    status(one),
                ]
            )
    return table("Contenders", *without_empty(heads, lines), words=2)


def model_table(rows: list[ModelRow]) -> str:
    """A line for each model."""
    whos = [
        who for who in ("eager", "inductor", AUTOTUNE, "fusion") if any(r.of(who) for r in rows)
    ]
    heads = ["model", "result", "ratio to Inductor", "ratio to eager"]
    heads += [f"{titled(who)}, ms" for who in whos]
    heads += ["noise", "peak, Inductor", "peak, fusion", "sites fused", "remark"]
    lines = []
    for row in rows:
        fused = row.of("fusion")
        lines.append(
            [
                row.title,
                result(row),
                *(
                    ratio(row.ratio("fusion", to) if verdict(row, to=to) else None)
                    for to in ("inductor", "eager")
                ),
                *(milli(c.step.median if (c := row.of(w)) and c.step else None) for w in whos),
                number(row.noise, f"{row.noise:.1%}" if row.noise is not None else ""),
                *(size((c := row.of(w)) and c.peak_bytes) for w in ("inductor", "fusion")),
                number(
                    fused and float(sum(fused.fused.values())),
                    str(sum(fused.fused.values()) if fused else ""),
                ),
                "; ".join(row.notes),
            ]
        )
    return table("Models", *without_empty(heads, lines), words=2)


def model_contender_table(rows: list[ModelRow]) -> str:
    heads = ["model", "contender", "step, ms", "IQR, ms", "kernels, ms", "ratio", "peak"]
    heads += ["first step, s", "cached, s", "error", "gradient's error", "remark"]
    lines = []
    for row in rows:
        for one in row.contenders:
            lines.append(
                [
                    model_name(row),
                    titled(one.name),
                    milli(one.step and one.step.median),
                    milli(one.step and one.step.iqr),
                    milli(one.device_ms),
                    ratio(row.ratio(one.name)),
                    size(one.peak_bytes),
                    number(one.cold_s, f"{one.cold_s or 0:.1f}"),
                    number(one.warm_s, f"{one.warm_s or 0:.1f}"),
                    error(one.output_error),
                    error(one.gradient_error),
                    status(one),
                ]
            )
    return table("Contenders of the models", *without_empty(heads, lines), words=2)


def model_details(rows: list[ModelRow]) -> str:
    return "\n".join(details(row) for row in rows if row.contenders)


def details(row: ModelRow) -> str:
    """The sites of a model's row, and its longest kernels, folded."""
    lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in sites(row.of("fusion")))
    parts = [f"<ul>{lines}</ul>"] if lines else []
    shares = [
        [titled(c.name), milli(c.device_ms), *(share(c.shares.get(k)) for k in KINDS)]
        for c in row.contenders
        if c.shares
    ]
    if shares:
        parts.append(
            table(
                f"Kernels of {row.title} by class",
                *without_empty(["contender", "kernels, ms", *KINDS], shares),
            )
        )
    kernels = [
        [
            kernel["name"][:100],
            titled(one.name),
            kernel["kind"],
            milli(kernel["ms"]),
            share(kernel["ms"] / one.device_ms if one.device_ms else None),
            number(kernel["calls"], units.digits(kernel["calls"], 2)),
        ]
        for one in row.contenders
        for kernel in one.kernels
    ]
    if kernels:
        heads = ["kernel", "contender", "class", "ms", "share", "calls"]
        parts.append(table(f"Longest kernels of {row.title}", heads, kernels, words=3))
    summary = f"<summary>{html.escape(row.title)}</summary>"
    return f"<details>{summary}{''.join(parts)}</details>"
