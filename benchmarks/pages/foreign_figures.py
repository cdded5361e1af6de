"""The figures of a run of benchmarks.foreign, whose rows are plain dicts here."""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean

from benchmarks.pages.markdown import table, where, wrapped
from benchmarks.records.runs import Run

NEARLY = 0.99


def foreign(run: Run, names: list[str]) -> str:
    """A paragraph, a table with a line a family, and the graphs that are slower than 0.99; with the
    name "each" all graphs in place of the families.
    """
    found = run.about["summary"]
    said = (
        f"{found['graphs']} graphs, {found['with_sites']} of them with a fused site. Plain "
        f"Inductor's GPU time divided by fusion's has a geometric mean of "
        f"{found['mean_with_sites']:.2f} over those, and of {found['mean']:.2f} over all; the "
        f"smallest is {found['min']:.2f} ({found['min_name']}). Beyond the noise "
        f"{found['faster']} are faster and {found['slower']} slower. "
        f"Results are missing, or further from fp64 than both Inductor's and eager's, in "
        f"{len(found['errors']) or 'no'} graph{'' if len(found['errors']) == 1 else 's'}."
    )
    parts = [wrapped(where(run)), wrapped(said)]
    if names == ["each"]:
        heads = ("graph", "plain Inductor ms", "fusion ms", "ratio", "noise", "fused")
        return "\n".join([*parts, "", table(heads, map(cells, run.rows))])
    parts.append(families(run.rows))
    if slow := sorted((r for r in run.rows if (r["ratio"] or 1.0) < NEARLY), key=ratio):
        heads = ("below 0.99", "plain Inductor ms", "fusion ms", "ratio", "noise", "fused")
        parts.append(table(heads, map(cells, slow)))
    return "\n".join(parts)


def ratio(row: dict) -> float:
    return row["ratio"]


def families(rows: list[dict]) -> str:
    """How many graphs of each family have a fused site, and their ratios."""
    lines = []
    for family in sorted({row["family"] for row in rows}):
        own = [row for row in rows if row["family"] == family and row["ratio"]]
        fused = sorted(row["ratio"] for row in own if row["accepted"])
        mean = f"{geometric_mean(fused):.2f}" if fused else "–"
        span = f"{fused[0]:.2f} to {fused[-1]:.2f}" if fused else "–"
        lines.append((family.replace("_", " "), str(len(own)), str(len(fused)), mean, span))
    heads = ("family", "graphs", "with a fused site", "their geometric mean", "their ratios")
    return table(heads, lines)


def cells(row: dict) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for site in row["accepted"]:
        counts[site["pattern"]] += site["count"]
    fused = ", ".join(f"{n} {name}" for name, n in counts.items())
    times = (f"{milliseconds(row, name):.4f}" for name in ("inductor", "fusion"))
    return row["name"], *times, f"{row['ratio']:.2f}", f"{row['noise']:.1%}", fused


def milliseconds(row: dict, name: str) -> float:
    """Of a contender or its twin, whichever is faster; in older files fusion has no twin, and the
    twin of Inductor does not count.
    """
    ms = {side["name"]: side["kernel"]["median"] for side in row["sides"] if side["kernel"]}
    twins = [f"{name}-again"] if "fusion-again" in ms else []
    return min(ms[one] for one in (name, *twins))
