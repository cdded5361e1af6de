"""Runs of benchmarks.models as Markdown."""

from __future__ import annotations

from benchmarks.measure.trace import KINDS
from benchmarks.pages.markdown import AUTOTUNE, number, of_names, table
from benchmarks.records.rows import ModelRow
from benchmarks.records.runs import Run


def model_name(row: ModelRow) -> str:
    return f"{row.name} {row.mode}"


def models_table(rows: list[ModelRow]) -> str:
    tuned, lines = any(row.ratio(AUTOTUNE) for row in rows), []
    names = ["eager", "inductor", *[AUTOTUNE] * tuned, "fusion"]
    for row in rows:
        if not row.contenders:
            lines.append([model_name(row), "; ".join(row.notes), *["–"] * (len(names) + 3)])
            continue
        one, two = row.of("inductor"), row.of("fusion")
        times = [
            f"{c.step.median:.2f}" if (c := row.of(name)) and c.step else c.status if c else "–"
            for name in names
        ]
        ratio = number(row.ratio("fusion"), ".2f")
        ratio += (
            f", to {AUTOTUNE} {row.ratio('fusion', AUTOTUNE):.2f}"
            if row.ratio("fusion", AUTOTUNE)
            else ""
        )
        peaks = [number(c and c.peak_bytes and c.peak_bytes / 1e9, ".1f") for c in (one, two)]
        fused = str(sum(two.fused.values())) if two else "–"
        lines.append([row.title, *times, ratio, number(row.noise, ".1%"), " → ".join(peaks), fused])
    heads = ["eager ms", "plain Inductor ms", *[f"{AUTOTUNE} ms"] * tuned, "fusion ms"]
    return table(["model", *heads, "ratio", "noise", "peak GB", "sites fused"], lines)


def models(run: Run, names: list[str]) -> str:
    return models_table(of_names(run.rows, names, model_name))


def compile_times(run: Run, names: list[str]) -> str:
    """Seconds to compile with empty and with filled caches, and what the gate measured."""
    lines = []
    for row in of_names(run.rows, names, model_name):
        one, two = row.of("inductor"), row.of("fusion")
        if not one or not two or None in (one.cold_s, two.cold_s, one.warm_s, two.warm_s):
            continue
        (cold, seconds), (warm, _) = two.measured["cold"], two.measured["warm"]
        times = [f"{c:.2f}" for c in (one.cold_s, two.cold_s, one.warm_s, two.warm_s)]
        times.insert(2, f"{two.cold_s / one.cold_s:.2f}")
        times.append(f"{two.warm_s / one.warm_s:.2f}")
        lines.append([model_name(row), *times, f"{cold} in {seconds:.1f} s", str(warm)])
    heads = [
        f"{turn} {name}"
        for turn in ("cold", "warm")
        for name in ("Inductor s", "fusion s", "ratio")
    ]
    return table(["model", *heads, "measured cold", "measured warm"], lines)


def shares(run: Run, names: list[str]) -> str:
    """Milliseconds of a step's kernels by class, plain Inductor → fusion."""
    rows = [
        row
        for row in of_names(run.rows, names, model_name)
        if all((c := row.of(name)) and c.shares for name in ("inductor", "fusion"))
    ]
    pairs = [[row.of("inductor"), row.of("fusion")] for row in rows]
    kinds = [kind for kind in KINDS if any(c.shares.get(kind) for pair in pairs for c in pair)]
    lines = []
    for row, pair in zip(rows, pairs, strict=True):
        parts = [[c.shares.get(kind, 0.0) * c.device_ms for c in pair] for kind in kinds]
        cells = [" → ".join(f"{part:.2f}" for part in two) if any(two) else "–" for two in parts]
        how = [word for word in ("attention eager", "dropout on") if word in row.title]
        lines.append(
            [
                ", ".join([model_name(row), *how]),
                " → ".join(f"{c.device_ms:.2f}" for c in pair),
                *cells,
            ]
        )
    return table(["model", "all kernels", *kinds], lines)
