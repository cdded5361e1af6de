"""What the Markdown figures of all kinds of run share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.measure import timing
from benchmarks.records.rows import OK, ModelRow, Row
from benchmarks.records.runs import Run

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
    plural = "s" if len(more) > 1 else ""
    more = f", and {len(more)} more command{plural} that the file names" if more else ""
    return f"{versions}, {about['date']}{revision}: `{first}`{more}."


def of_names(rows: list, names: list[str], name: Callable[[object], str]) -> list:
    known = {name(row): row for row in rows}
    if missing := [asked for asked in names if asked not in known]:
        raise Wrong(f"no row {'; '.join(missing)}")
    return [known[asked] for asked in names] if names else rows
