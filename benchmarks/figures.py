"""Results as Markdown: the tables and paragraphs that benchmarks.readme writes into README.md and
docs/.

A figure takes a run and the names that the page gave after the file; without names it is about all
rows.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable

from benchmarks import timing
from benchmarks.results import OK, ModelRow, Row, Run
from benchmarks.table import LONG_MS
from benchmarks.trace import KINDS

LARGE = 50e6  # bytes; the allocator's rounding is less
SAME = 0.02  # memory that differs by less is no difference
AUTOTUNE, FORCED = "max-autotune", "fusion-always"
TITLES = {"inductor": "plain Inductor"}


class Wrong(Exception):
    """A page asks for figures that there are not."""


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def wrapped(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines) + "\n"


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def verdict(row: Row | ModelRow, name: str = "fusion", to: str = "inductor") -> str:
    """ "faster" or "slower" than another, or "same", as plain Inductor's own code is where the gate
    declined; "" where one of them has no time, or was wrong.
    """
    pair = row.of(name), row.of(to)
    if not all(one and one.status == OK for one in pair) or row.ratio(name, to) is None:
        return ""
    model = isinstance(row, ModelRow)
    if (
        to == "inductor"
        and not model
        and pair[0].declined
        and not (name == "fusion" and row.instead())
    ):
        return "same"
    mine, other = (one.step if model else one.kernel for one in pair)
    return timing.verdict(mine, other, row.noise) or "same"


def counted(rows: list, to: str = "inductor") -> dict[str, list]:
    return {
        kind: [row for row in rows if verdict(row, to=to) == kind]
        for kind in ("faster", "same", "slower")
    }


def where(run: Run) -> str:
    about = run.about
    versions = f"{about['gpu'] or 'A CPU'}, torch {about['torch']}, triton {about['triton']}"
    versions += f", transformers {about['transformers']}" if about.get("transformers") else ""
    revision = f", revision {about['revision']}" if about.get("revision") else ""
    first, *more = about["command"].split("; ")
    more = f", and {len(more)} commands more that the file names" if more else ""
    return f"{versions}, {about['date']}{revision}: `{first}`{more}."


def source(run: Run, _: list[str]) -> str:
    stopped = run.about.get("stopped")
    return wrapped(where(run) + (f" The run stopped: {stopped}." if stopped else ""))


# Patterns.


def ours(row: Row) -> str:
    """With the default gate, or where that was not timed, with fusion.gate=always."""
    return "fusion" if row.of("fusion") else FORCED


def declined(row: Row) -> bool:
    """Is all of it Inductor's?"""
    return bool(row.of("fusion") and row.of("fusion").declined and not row.instead())


def summary(run: Run, _: list[str]) -> str:
    about, rows, kinds = run.about, run.rows, counted(run.rows)
    text = (
        f"{where(run)} In {len(kinds['faster'])} of {sum(map(len, kinds.values()))} rows fusion with its default gate "
        f"is faster than plain Inductor, in {len(kinds['same'])} as fast (within {timing.SMALLEST:.0%} or the noise), "
        f"in {len(kinds['slower'])} slower; in {sum(map(declined, rows))} the gate leaves the site to Inductor."
    )
    tuned = counted(rows, AUTOTUNE)
    if timed := sum(map(len, tuned.values())):
        text += (
            f" Of the {timed} rows that max-autotune was timed in, fusion is faster than it in {len(tuned['faster'])}, "
            f"as fast in {len(tuned['same'])}, slower in {len(tuned['slower'])}."
        )
    if noise := about.get("noise"):
        text += (
            f" The same code timed twice differs by {noise['median']:.1%} (median), {noise['max']:.1%} at most, in "
            f"{noise['rows']} rows of {LONG_MS * 1e3:.0f} µs and more."
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
        text += f" Not compared, for one of the two is wrong or failed: {'; '.join(wrong)}."
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
        lines.append([pattern, *counts, str(sum(map(declined, rows))), f"{ratios[0]:.2f}",
                      f"{statistics.median(ratios):.2f}", f"{ratios[-1]:.2f}", to])  # fmt: skip
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


def of_names(rows: list, names: list[str], name: Callable[[object], str]) -> list:
    known = {name(row): row for row in rows}
    if missing := [asked for asked in names if asked not in known]:
        raise Wrong(f"no row {'; '.join(missing)}")
    return [known[asked] for asked in names] if names else rows


def rows_table(rows: list[Row]) -> str:
    """Columns of eager, max-autotune and of the kernels that the gate declines where
    there are any.
    """
    others = [
        name for name in ("eager", "inductor", AUTOTUNE) if any(row.ratio(name) for row in rows)
    ]
    tuned = AUTOTUNE in others
    left = [bool(declined(row) or row.instead()) for row in rows]
    forced = any(row.ratio(FORCED) and own for row, own in zip(rows, left, strict=True))
    heads = ["site", *(TITLES.get(name, name) for name in others), "fusion", "ratio",
        *["to max-autotune"] * tuned,
             "of the floor", *["forced"] * forced]  # fmt: skip
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
        pairs = [(getattr(base, kind, None), [getattr(c, kind, None) for c in found])
                 for kind in ("peak_bytes", "saved_bytes")]  # fmt: skip
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


# Models.


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


def shares(run: Run, names: list[str]) -> str:
    """Milliseconds of a step's kernels by class, plain Inductor → fusion."""
    rows = [row for row in of_names(run.rows, names, model_name) if all(
        (c := row.of(name)) and c.shares for name in ("inductor", "fusion"))]  # fmt: skip
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


# The other runs.


def compared(run: Run, _: list[str]) -> str:
    """How much the two sides differ; of kernels that take 20 µs, and of all."""
    rows = [row for row in run.rows if row.ratio]
    long = [row for row in rows if row.base.median >= LONG_MS]
    text = where(run)
    for words, some in (("take at least 20 µs", long), ("were timed", rows)):
        off = sorted(abs(row.ratio - 1) for row in some)
        if off:
            within = sum(x <= 0.03 for x in off)
            text += (f" Of the {len(off)} kernels that {words}, {within} differ by at most 3%; median "
                     f"{statistics.median(off):.1%}, largest {off[-1]:.1%}.")  # fmt: skip
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
        cells = [number(row and row.rate_bytes / 1e9,
            ".0f") + (f" ({row.block}, {row.warps})" if row else "")
                 for row in (taken, best)]  # fmt: skip
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


@dataclasses.dataclass(frozen=True)
class Figure:
    kinds: tuple[str, ...]  # of runs that it is made from; none: all
    write: Callable[[Run, list[str]], str]


FIGURES = {
    "source": Figure((), source),
    "summary": Figure(("patterns",), summary),
    "by-pattern": Figure(("patterns",), by_pattern),
    "rows": Figure(("patterns",), named_rows),
    "memory": Figure(("patterns",), memory),
    "losses": Figure(("patterns", "models"), losses),
    "models": Figure(("models",), models),
    "shares": Figure(("models",), shares),
    "compared": Figure(("compare",), compared),
    "block-sizes": Figure(("block_size",), block_sizes),
    "swept": Figure(("sweep",), swept),
    "compiled": Figure(("compile_kernels",), compiled),
}
