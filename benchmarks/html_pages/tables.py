"""A table of a page, which page.js makes sortable and searchable; without it, a plain table."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable

from benchmarks.html_pages import units
from benchmarks.pages.markdown import TITLES
from benchmarks.records.rows import OK, Spread


@dataclasses.dataclass(frozen=True)
class Cell:
    """`value` is what the column is sorted by, if it is not the text."""

    text: str
    value: float | None = None
    css: str = ""


EMPTY = Cell("")
WIDEST = 24.0  # em, of the first column
PLAIN = re.compile(r"[\d,]+(\.\d+)?")  # what page.js reads as a number by itself


def number(value: float | None, text: str, css: str = "") -> Cell:
    return EMPTY if value is None else Cell(text, value, css)


def micro(spread: Spread | None, css: str = "") -> Cell:
    """The median in µs, which all cells of a column share so that they can be compared."""
    return number(spread and spread.median, spread and units.digits(spread.median * 1e3), css)


def milli(ms: float | None, css: str = "") -> Cell:
    return number(ms, units.digits(ms) if ms is not None else "", css)


def ratio(value: float | None, css: str = "") -> Cell:
    return number(value, units.times(value), css)


def share(value: float | None) -> Cell:
    return number(value, units.share(value))


def size(value: float | None) -> Cell:
    return number(value, units.size(value))


def error(value: float | None) -> Cell:
    return number(value, units.error(value))


def status(one) -> Cell:
    """What is to be said about a contender: wrong, failed, or left to Inductor, and why."""
    if one.status != OK:
        return Cell(f"{one.status}: {one.note}" if one.note else one.status, css="bad")
    declined = getattr(one, "declined", "")
    if isinstance(declined, str) and declined:
        return Cell(f"declined: {declined}")
    return Cell(one.note)


def region(name: str, body: str) -> str:
    """A box that scrolls by itself, with the keyboard too."""
    return (
        f'<div class="box" role="region" tabindex="0" aria-label="{html.escape(name)}">{body}</div>'
    )


def table(name: str, heads: list[str], lines: Iterable[list[Cell | str]], words: int = 1) -> str:
    """The first `words` columns, and those whose cells are all text, are aligned left. `name` says
    what the table is, for the search field and for who cannot see it.
    """
    rows = [[Cell(cell) if isinstance(cell, str) else cell for cell in line] for line in lines]
    left = [
        i < words or all(row[i].value is None for row in rows) and any(row[i].text for row in rows)
        for i in range(len(heads))
    ]
    top = "".join(
        f'<th scope="col"{" class=l" * left[i]}>{html.escape(head)}</th>'
        for i, head in enumerate(heads)
    )
    body = "\n".join(
        "<tr>" + "".join(map(td, row, left, range(len(row)))) + "</tr>" for row in rows
    )
    inner = f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    wide = min(WIDEST, 0.55 * max((len(row[0].text) for row in rows), default=0) + 1.5)
    marks = f'data-name="{html.escape(name)}" style="--first: {wide:.0f}em"'
    return f'<div class="sortable" {marks}>{region(name, inner)}</div>'


def td(cell: Cell, left: bool, index: int) -> str:
    css = " ".join(filter(None, ("l" if left else "", cell.css)))
    marks = f' class="{css}"' if " " in css else f" class={css}" if css else ""
    if cell.value is not None and not PLAIN.fullmatch(cell.text):
        marks += f" data-v={plain(cell.value)}"
    if index:
        return f"<td{marks}>{html.escape(cell.text)}</td>"
    return f'<th scope="row"{marks}>{html.escape(cell.text)}</th>'


def plain(value: float) -> str:
    """Five digits without an exponent."""
    text = units.digits(float(value), 5).replace(",", "")
    return text.rstrip("0").rstrip(".") if "." in text else text


def unlike(dicts: list[dict]) -> list[str]:
    """The keys that any of them has a value for, without a status that is ok everywhere."""
    keys = dict.fromkeys(key for row in dicts for key in row)
    return [key for key in keys if any(row.get(key) not in (None, "", False, OK) for row in dicts)]


FORMS = {
    "kernel": lambda v: micro(v),
    "base": lambda v: micro(v),
    "new": lambda v: micro(v),
    "rate_bytes": lambda v: Cell(f"{v / 1e9:,.0f}", v),
    "ms": lambda v: milli(v),
    "ratio": ratio,
    "low": ratio,
    "high": ratio,
}
HEADS = {
    "kernel": "kernel, µs",
    "base": "base, µs",
    "new": "new, µs",
    "rate_bytes": "GB/s",
    "block": "BLOCK",
    "ms": "kernel, ms",
    "who": "contender",
}


def plain_table(name: str, rows: list) -> str:
    """Block sizes, commits and whatever else: every field that has a value, a time by its
    median.
    """
    dicts = [
        row
        if isinstance(row, dict)
        else {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        for row in rows
    ]
    keys = unlike(dicts)

    def cell(key, value) -> Cell:
        if value is None or value == "":
            return EMPTY
        if isinstance(value, bool):
            return Cell("yes" if value else "")
        if key in FORMS and (isinstance(value, Spread) or isinstance(value, (int, float))):
            return FORMS[key](value)
        if isinstance(value, int):
            return Cell(f"{value:,}", value)
        if isinstance(value, float):
            return Cell(units.digits(value), value)
        return Cell(TITLES.get(value, value) if key == "who" else str(value))

    lines = [[cell(key, row.get(key)) for key in keys] for row in dicts]
    return table(name, [HEADS.get(key, key.replace("_", " ")) for key in keys], lines)
