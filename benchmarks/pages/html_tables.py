"""The tables of a run's HTML page."""

from __future__ import annotations

import dataclasses
import html

from benchmarks.measure.trace import KINDS
from benchmarks.pages.drawing import byte_words
from benchmarks.pages.model_text import HEADS, cells, sites
from benchmarks.records.rows import FAILED, OK, ModelRow, Row
from benchmarks.records.runs import Run


def table(heads: list[str], lines: list[list[str]], first: set[int] = frozenset()) -> str:
    """`first` are the lines with a rule above them. Cells are HTML."""
    rows = ["<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in heads) + "</tr>"]
    for i, line in enumerate(lines):
        row = "<tr class=first>" if i in first else "<tr>"
        rows.append(row + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>")
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>\n"


def show(value, form: str, scale: float = 1) -> str:
    return "" if value is None else format(value * scale, form)


def about(run: Run) -> str:
    """The machine, the command and the noise."""
    lines = []
    for key, value in run.about.items():
        if value in (None, {}, ""):
            continue
        if key == "copy_bytes_s":
            key, value = "copy, measured in this run", f"{value / 1e12:.2f} TB/s"
        elif key == "matrix_flops_s":
            key, value = "bf16 matrix product, measured in this run", f"{value / 1e12:.0f} TFLOP/s"
        elif key == "gpu_memory":
            key, value = "memory of the GPU", byte_words(value)
        elif key == "noise":
            value = (
                f"median {value['median']:.1%}, largest {value['max']:.1%} of {value['rows']} rows"
            )
        lines.append([html.escape(key), html.escape(str(value))])
    return table(["this run", ""], lines)


def pattern_table(rows: list[Row]) -> str:
    heads = [
        "contender",
        "kernel ms",
        "IQR",
        "min",
        "call ms",
        "ratio",
        "GB/s",
        "TFLOP/s",
        "of the floor",
        "error",
        "peak",
        "saved",
        "compile s",
        "",
    ]
    lines, first = [], set()
    for row in rows:
        first.add(len(lines))
        counted = f"{byte_words(row.bytes)}, {row.flops / 1e9:.3g} GFLOP" if row.bytes else ""
        noise = f", noise {row.noise:.1%}" if row.noise is not None else ""
        remark = f"{counted}, floor {row.floor_ms:.4f} ms{noise} {html.escape(row.note)}"
        lines.append([f"<b>{html.escape(row.name)}</b>", *[""] * (len(heads) - 2), remark])
        for one in row.contenders:
            k = one.kernel
            lines.append(
                [
                    html.escape(one.name),
                    show(k and k.median, ".4f"),
                    show(k.iqr / k.median, ".1%") if k and k.q25 is not None else "",
                    show(k and k.min, ".4f"),
                    show(one.call and one.call.median, ".4f"),
                    show(row.ratio(one.name), ".2f"),
                    show(one.rate_bytes, ".0f", 1e-9),
                    show(one.rate_flops, ".3g", 1e-12),
                    show(row.floor_ms / k.median, ".0%") if k else "",
                    show(one.errors and one.errors.distance, ".1e"),
                    "" if one.peak_bytes is None else byte_words(one.peak_bytes),
                    "" if one.saved_bytes is None else byte_words(one.saved_bytes),
                    show(one.compile_s, ".1f"),
                    word(one),
                ]
            )
    note = (
        "<p>ratio: plain Inductor's kernel time over this one's; "
        "error: |got − exact| / |exact| against fp64.</p>"
    )
    return note + table(heads, lines, first)


def word(one) -> str:
    """What stands at the end of a contender's line."""
    if one.status != OK:
        return f'<span class="bad">{one.status}</span> {html.escape(one.note)}'
    declined = getattr(one, "declined", "")
    return f"declined: {html.escape(declined)}" if isinstance(declined, str) and declined else ""


def model_table(rows: list[ModelRow]) -> str:
    lines, first, more = [], set(), []
    for row in rows:
        first.add(len(lines))
        noise = ""
        if row.noise is not None:
            noise = f"noise {row.noise:.1%} ({html.escape(row.twin)} timed twice)"
        notes = html.escape("; ".join(row.notes))
        lines.append(
            [f"<b>{html.escape(row.title)}</b>", *[""] * (len(HEADS) - 1), f"{noise} {notes}"]
        )
        for one in row.contenders:
            name, *rest = cells(row, one)
            lines.append(
                [
                    html.escape(name),
                    *([""] * len(rest) if one.status == FAILED else rest),
                    word(one),
                ]
            )
        more += row_details(row)
    note = (
        "<p>ms: wall time of a step; kernels: device time of its kernels; "
        "ratio: Inductor's step over this one's.</p>"
    )
    return (
        note + table([*HEADS, ""], lines, first) + "<h2>Sites and kernels</h2>\n" + "\n".join(more)
    )


def row_details(row: ModelRow) -> list[str]:
    """The sites of a model's row, and where the time of its kernels goes."""
    lines = html.escape("\n".join(sites(row.of("fusion"))))
    parts = [f"<h3>{html.escape(row.title)}</h3>\n<pre>{lines}</pre>"]
    kinds = [kind for kind in KINDS if any(c.shares.get(kind) for c in row.contenders)]
    shares = [
        [html.escape(c.name), f"{c.device_ms:.3f}", *(f"{c.shares.get(k, 0):.1%}" for k in kinds)]
        for c in row.contenders
        if c.shares
    ]
    if shares:
        parts.append(table(["share of kernels", "ms", *kinds], shares))
    for one in (c for c in row.contenders if c.kernels):
        kernels = [
            [
                f"{kernel['ms']:.4f}",
                f"{kernel['ms'] / one.device_ms:.1%}",
                f"{kernel['calls']:.4g}",
                html.escape(kernel["kind"]),
                html.escape(kernel["name"][:100]),
            ]
            for kernel in one.kernels
        ]
        heads = ["ms", "share", "calls", "class", "kernel"]
        summary = f"<summary>longest kernels of {html.escape(one.name)}</summary>"
        parts.append(f"<details>{summary}{table(heads, kernels)}</details>")
    return parts


def plain_table(rows: list) -> str:
    """Block sizes, commits and whatever else: every field, a time by its median."""
    dicts = [
        row
        if isinstance(row, dict)
        else {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        for row in rows
    ]
    heads = list(dict.fromkeys(key for row in dicts for key in row))

    def cell(value) -> str:
        value = getattr(value, "median", value)
        return (
            ""
            if value is None
            else f"{value:.6g}"
            if isinstance(value, float)
            else html.escape(str(value))
        )

    return table(heads, [[cell(row.get(head)) for head in heads] for row in dicts])
