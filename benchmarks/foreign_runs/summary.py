"""All rows of a run in a few numbers, as text, as Markdown and as an exit status."""

from __future__ import annotations

import math
from collections.abc import Iterable

from benchmarks.foreign_runs.rows import NO_BASELINE, GraphRow
from benchmarks.foreign_runs.steps import FUSION, INDUCTOR
from benchmarks.processes.pool import CRASHED, TIMEOUT
from benchmarks.records.rows import FAILED, OK, WRONG

LEAST, NEARLY = 0.98, 0.99  # ratios: what no graph may be below, and what is counted besides
ERRORS = (FAILED, WRONG, TIMEOUT, CRASHED)


def geometric_mean(ratios: Iterable[float]) -> float | None:
    found = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(found) / len(found)) if found else None


def summary(rows: list[GraphRow]) -> dict:
    """The numbers of a run. Graphs that were not timed count in `graphs` alone."""
    timed = [row for row in rows if row.ratio is not None]
    fused = [row for row in timed if row.sites]
    least = min(timed, key=lambda row: row.ratio, default=None)
    return dict(
        graphs=len(rows),
        timed=len(timed),
        with_sites=len(fused),
        mean_with_sites=geometric_mean(row.ratio for row in fused),
        mean=geometric_mean(row.ratio for row in timed),
        mean_of_calls=geometric_mean(row.call_ratio for row in timed if row.call_ratio),
        min=least and least.ratio,
        min_name=least and least.name,
        below_98=[row.name for row in timed if row.ratio < LEAST],
        below_99=[row.name for row in timed if row.ratio < NEARLY],
        too_slow=[row.name for row in rows if too_slow(row)],
        faster=sum(row.verdict == "faster" for row in timed),
        slower=sum(row.verdict == "slower" for row in timed),
        errors={row.name: f"{row.status}: {row.note}" for row in rows if row.status in ERRORS},
        no_baseline={row.name: row.note for row in rows if row.status == NO_BASELINE},
        compile_s={name: seconds(timed, name) for name in (INDUCTOR, FUSION)},
    )


def seconds(rows: list[GraphRow], name: str) -> float:
    return math.fsum(row.side(name).compile_s or 0.0 for row in rows if row.side(name))


def too_slow(row: GraphRow) -> bool:
    """Slower than 0.98, and beyond its noise."""
    return row.ratio is not None and row.ratio < LEAST and row.verdict == "slower"


def status(rows: list[GraphRow]) -> int:
    """The exit status: 1 where a graph went wrong or is too slow."""
    return int(any(row.status in ERRORS or too_slow(row) for row in rows))


def line(row: GraphRow) -> str:
    """A row on the terminal."""
    if row.ratio is None:
        return f"{row.name:48} {row.status.upper()}: {row.note}"
    base, mine = (row.best(name).median for name in (INDUCTOR, FUSION))
    sign = {"faster": "+", "slower": "-"}.get(row.verdict, " ")
    wrong = f"  {row.status.upper()}: {row.note}" if row.status != OK else ""
    times = f"{base:9.4f} {mine:9.4f} {row.ratio:7.3f}{sign} {row.noise:6.1%}"
    return f"{row.name:48} {times}  {sites(row)}{wrong}"


def sites(row: GraphRow) -> str:
    counts = {site["pattern"]: 0 for site in row.accepted}
    for site in row.accepted:
        counts[site["pattern"]] += site["count"]
    return ", ".join(f"{n} {pattern}" for pattern, n in counts.items()) or "0 sites accepted"


def text(found: dict) -> str:
    """The summary as lines; `found` is that of `summary`."""
    lines = [
        f"{found['graphs']} graphs, {found['timed']} timed, "
        f"{found['with_sites']} with an accepted site",
        f"Inductor's device time / ours, geometric mean: {shown(found['mean_with_sites'])} of "
        f"graphs with an accepted site, {shown(found['mean'])} of all; of whole calls "
        f"{shown(found['mean_of_calls'])}",
        f"smallest: {shown(found['min'])} {found['min_name'] or ''}".rstrip(),
        f"beyond the noise: {found['faster']} faster, {found['slower']} slower",
        f"compiling: Inductor {found['compile_s'][INDUCTOR]:.0f} s, "
        f"fusion {found['compile_s'][FUSION]:.0f} s (they compare with --apart only)",
    ]
    for key, what in (("below_98", "below 0.98"), ("below_99", "below 0.99")):
        lines.append(f"{what}: {len(found[key])}{names(found[key])}")
    lines.append(f"below 0.98 beyond the noise: {len(found['too_slow'])}{names(found['too_slow'])}")
    lines += [f"error: {name}: {why}" for name, why in found["errors"].items()]
    lines += [f"not compared: {name}: {why}" for name, why in found["no_baseline"].items()]
    return "\n".join(lines)


def names(found: list[str]) -> str:
    return f" ({', '.join(found)})" if found else ""


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


HEAD = ("graph", "source", "Inductor ms", "fusion ms", "ratio", "noise", "accepted", "note")


def markdown(rows: list[GraphRow]) -> str:
    """The summary and a table of all rows, the slowest first."""
    found = [f"- {one}" for one in text(summary(rows)).splitlines()]
    table = [HEAD, ("---",) * len(HEAD)]
    for row in sorted(rows, key=lambda row: (row.ratio is not None, row.ratio or 0.0)):
        if row.ratio is None:
            cells = (row.name, row.source, "", "", "", "", "", f"{row.status}: {row.note}")
        else:
            base, mine = (f"{row.best(name).median:.4f}" for name in (INDUCTOR, FUSION))
            note = row.note if row.status == OK else f"{row.status}: {row.note}"
            ratio, spread = f"{row.ratio:.3f}", f"{row.noise:.1%}"
            cells = (row.name, row.source, base, mine, ratio, spread, sites(row), note)
        table.append(tuple(cell.replace("|", "\\|") for cell in cells))
    return "\n".join([*found, "", *("| " + " | ".join(cells) + " |" for cells in table), ""])
