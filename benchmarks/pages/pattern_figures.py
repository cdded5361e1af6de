"""Runs of benchmarks.patterns as Markdown."""

from __future__ import annotations

import statistics

from benchmarks.measure import timing
from benchmarks.measure.timing import LONG_MS
from benchmarks.pages.markdown import (
    AUTOTUNE,
    FORCED,
    LARGE,
    SAME,
    TITLES,
    counted,
    number,
    of_names,
    table,
    verdict,
    where,
    wrapped,
)
from benchmarks.pages.model_figures import models_table
from benchmarks.records.rows import OK, Row
from benchmarks.records.runs import Run


def ours(row: Row) -> str:
    """With the default gate, or where that was not timed, with fusion.gate=always."""
    return "fusion" if row.of("fusion") else FORCED


def declined(row: Row) -> bool:
    """Is all of it Inductor's?"""
    return bool(row.of("fusion") and row.of("fusion").declined and not row.instead())


def summary(run: Run, _: list[str]) -> str:
    about, rows, kinds = run.about, run.rows, counted(run.rows)
    text = (
        f"{where(run)} In {len(kinds['faster'])} of {sum(map(len, kinds.values()))} rows fusion "
        f"with its default gate is faster than plain Inductor, in {len(kinds['same'])} as fast "
        f"(within {timing.SMALLEST:.0%} or the noise), in {len(kinds['slower'])} slower; in "
        f"{sum(map(declined, rows))} the gate leaves the site to Inductor."
    )
    tuned = counted(rows, AUTOTUNE)
    if timed := sum(map(len, tuned.values())):
        text += (
            f" Of the {timed} rows in which max-autotune was timed, fusion is faster than it in "
            f"{len(tuned['faster'])}, as fast in {len(tuned['same'])}, "
            f"slower in {len(tuned['slower'])}."
        )
    if noise := about.get("noise"):
        text += (
            f" The same code timed twice differs by {noise['median']:.1%} (median), "
            f"{noise['max']:.1%} at most, in {noise['rows']} rows of {LONG_MS * 1e3:.0f} µs and "
            "more."
        )
    if kinds["slower"]:
        slower = (
            f"{row.name} ({ms(row, 'fusion')} ms, Inductor {ms(row, 'inductor')})"
            for row in kinds["slower"]
        )
        text += f" Slower than plain Inductor: {'; '.join(slower)}."
    wrong = [
        f"{row.name}: {one.name} {one.status}"
        for row in rows
        for one in row.contenders
        if one.status != OK
    ]
    wrong += [f"{row.name}: {row.note}" for row in rows if not row.contenders]
    if wrong:
        text += f" Not compared, because one of the two is wrong or failed: {'; '.join(wrong)}."
    if about.get("stopped"):
        text += f" The run stopped: {about['stopped']}."
    return wrapped(text)


def ms(row: Row, name: str) -> str:
    one = row.of(name)
    return f"{one.kernel.median:.4f}" if one and one.kernel else "–"


def by_pattern(run: Run, _: list[str]) -> str:
    patterns: dict[str, list[Row]] = {}
    for row in run.rows:
        if verdict(row):
            patterns.setdefault(row.pattern, []).append(row)
    lines = []
    for pattern, rows in patterns.items():
        counts = [str(len(found)) for found in counted(rows).values()]
        ratios = sorted(row.ratio("fusion") for row in rows)
        tuned = [ratio for row in rows if (ratio := row.ratio("fusion", AUTOTUNE))]
        to = number(statistics.median(tuned) if tuned else None, ".2f")
        lines.append(
            [
                pattern,
                *counts,
                str(sum(map(declined, rows))),
                f"{ratios[0]:.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{ratios[-1]:.2f}",
                to,
            ]
        )
    heads = (
        "pattern",
        "faster",
        "as fast",
        "slower",
        "declined",
        "worst ratio",
        "median",
        "best",
        "to max-autotune",
    )
    return table(heads, lines)


def rows_table(rows: list[Row]) -> str:
    """Columns of eager, max-autotune, flex_attention and of the kernels that the gate declines
    where there are any.
    """
    known = "eager", "inductor", AUTOTUNE, "flex"
    others = [name for name in known if any(row.ratio(name) for row in rows)]
    tuned = AUTOTUNE in others
    left = [bool(declined(row) or row.instead()) for row in rows]
    forced = any(row.ratio(FORCED) and own for row, own in zip(rows, left, strict=True))
    heads = [
        "site",
        *(TITLES.get(name, name) for name in others),
        "fusion",
        "ratio",
        *["to max-autotune"] * tuned,
        "of the floor",
        *["forced"] * forced,
    ]
    lines = []
    for row, own in zip(rows, left, strict=True):
        one, taken = row.of(ours(row)), f" (by {', '.join(row.instead())})" if row.instead() else ""
        line = [row.name, *(ms(row, name) for name in others), ms(row, ours(row))]
        line.append(
            number(row.ratio(ours(row)), ".2f") + (" (declined)" if declined(row) else taken)
        )
        line += [number(row.ratio(ours(row), AUTOTUNE), ".2f")] * tuned
        line.append(f"{row.floor_ms / one.kernel.median:.0%}" if one and one.kernel else "–")
        lines.append(line + [number(row.ratio(FORCED) if own else None, ".2f")] * forced)
    return table(heads, lines)


def named_rows(run: Run, names: list[str]) -> str:
    return rows_table(of_names(run.rows, names, lambda row: row.name))


def memory(run: Run, names: list[str]) -> str:
    """The most that a step allocates, and what forward keeps for backward, where fusion's differs
    by 2% and 50 MB.
    """
    lines = []
    for row in of_names(run.rows, names, lambda row: row.name):
        base, found = row.of("inductor"), [row.of(name) for name in ("fusion", FORCED)]
        pairs = [
            (getattr(base, kind, None), [getattr(c, kind, None) for c in found])
            for kind in ("peak_bytes", "saved_bytes")
        ]
        if names or any(
            was and now and abs(now - was) > max(SAME * was, LARGE)
            for was, all in pairs
            for now in all
        ):
            lines.append(
                [
                    row.name,
                    *(number(n and n / 1e6, ".0f") for was, all in pairs for n in (was, *all)),
                ]
            )
    heads = [
        f"{what}, {who}"
        for what in ("peak MB", "kept MB")
        for who in ("plain Inductor", "fusion", "forced")
    ]
    return table(["site", *heads], lines)


def losses(run: Run, _: list[str]) -> str:
    """The rows in which plain Inductor or max-autotune is faster."""
    if run.kind == "models":
        rows = [row for row in run.rows if "slower" in (verdict(row), verdict(row, to=AUTOTUNE))]
        return models_table(rows) if rows else "None.\n"
    rows = [
        row
        for row in run.rows
        if "slower" in (verdict(row, ours(row)), verdict(row, ours(row), AUTOTUNE))
    ]
    return rows_table(rows) if rows else "None.\n"
