"""A model's row of a run of benchmarks.models as text."""

from __future__ import annotations

from benchmarks.records.rows import FAILED, OK, ModelContender, ModelRow

HEADS = (
    "contender",
    "ms",
    "IQR",
    "ratio",
    "kernels",
    "peak GB",
    "cold s",
    "warm s",
    "err out",
    "err grad",
)


def cells(row: ModelRow, one: ModelContender) -> list[str]:
    """A line of the table: a contender; "-" is what does not apply or was not measured."""

    def show(value, form):
        return "-" if value is None else format(value, form)

    step, peak = one.step, one.peak_bytes
    mark = {"faster": "+", "slower": "-"}.get(one.verdict, " " if step else "")
    return [
        one.name,
        show(step and step.median, ".3f"),
        show(step and step.iqr, ".3f"),
        show(row.ratio(one.name), ".2f") + mark,
        show(one.device_ms, ".3f"),
        show(peak and peak / 1e9, ".2f"),
        show(one.cold_s, ".1f"),
        show(one.warm_s, ".1f"),
        show(one.output_error, ".1e"),
        show(one.gradient_error, ".1e"),
    ]


def text(row: ModelRow) -> str:
    """The row as a table with its sites and shares."""
    lines = [row.title]
    lines.append(f"  {HEADS[0]:18}" + "".join(f"{head:>10}" for head in HEADS[1:]))
    for one in row.contenders:
        first, *rest = cells(row, one)
        why = "" if one.status == OK else f"  {one.status.upper()}: {one.note}"
        lines.append(
            f"  {first:18}"
            + ("" if one.status == FAILED else "".join(f"{c:>10}" for c in rest))
            + why
        )
    if row.noise is not None:
        legend = "ratio: plain Inductor's time / this one's, + and - beyond noise"
        lines.append(f"  noise {row.noise:.1%} ({row.twin} timed twice); {legend}")
    lines += [f"  {note}" for note in row.notes]
    lines += measured(row.of("fusion"))
    lines += sites(row.of("fusion"))
    kinds = list(dict.fromkeys(kind for one in row.contenders for kind in one.shares))
    if kinds:
        lines.append(
            f"  {'share of kernels':18}"
            + "".join(f"{kind:>{max(10, len(kind) + 2)}}" for kind in kinds)
        )
    for one in (c for c in row.contenders if c.shares):
        parts = "".join(f"{one.shares.get(kind, 0):>{max(10, len(kind) + 2)}.1%}" for kind in kinds)
        lines.append(f"  {one.name:18}{parts}")
    return "\n".join(lines)


def measured(one: ModelContender | None) -> list[str]:
    """What the gate measured while it compiled, where it measured anything."""
    if one is None or not any(classes for classes, _ in one.measured.values()):
        return []
    parts = [f"{turn} {n} in {s:.1f} s" for turn, (n, s) in one.measured.items()]
    return [f"  classes of regions measured: {', '.join(parts)}"]


def sites(one: ModelContender | None) -> list[str]:
    """What fusion did, in lines."""
    if one is None or one.status == FAILED:
        return []
    fused = ", ".join(f"{n} {pattern}" for pattern, n in sorted(one.fused.items())) or "nothing"
    return [f"  fused: {fused}"] + [
        f"  not fused: {d['count']} {d['pattern']}: {d['reason']}" for d in one.declined
    ]
