"""A row of the run as numbers, and the rows as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict

from benchmarks.host_runs.generated import Counts
from benchmarks.host_runs.measuring import Measured

ALLOWED_US = 2.0  # more than plain Inductor, at one site


def summarized(name: str, mode: str, found: dict[str, Measured]) -> dict:
    """Medians over the turns; `more_us` is fusion's time less Inductor's, turn by turn, and
    `again_us` that of the same code compiled again.
    """
    return {
        "graph": name,
        "mode": mode,
        "more_us": apart(found["fusion"].us, found["inductor"].us),
        "error_us": error(found["fusion"].us, found["inductor"].us),
        "again_us": apart(found["inductor-again"].us, found["inductor"].us),
        "contenders": [
            {
                "name": who,
                "us": statistics.median(one.us),
                **asdict(one.counts),
                "layers": one.layers,
            }
            for who, one in found.items()
        ],
    }


def apart(one: list[float], other: list[float]) -> float:
    """The median of the differences within turns."""
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


def error(one: list[float], other: list[float]) -> float:
    """Three standard errors of that median: of a median, 1.25 IQR / 1.35 / sqrt(n)."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return float("inf")
    low, _, high = statistics.quantiles(differences, n=4)
    return 3 * 1.25 * (high - low) / 1.35 / len(differences) ** 0.5


def only_counted(name: str, mode: str, found: dict[str, Counts]) -> dict:
    """A row without times: what the generated code does."""
    contenders = [dict(name=who, us=None, **asdict(one)) for who, one in found.items()]
    return {"graph": name, "mode": mode, "contenders": contenders}


def table(rows: Iterable[dict]) -> str:
    """A line for each contender of each row; "-" is what was not measured."""
    lines = [
        f"{'graph':14}{'mode':7}{'contender':15}{'µs':>8}{'more':>8}{'±':>6}{'launches':>9}"
        f"{'ours':>5}{'fills':>6}{'allocations':>12}{'library':>8}  layers, µs"
    ]
    for row in rows:
        for one in row["contenders"]:
            more, sure = None, None
            if one["name"] == "fusion":
                more, sure = row.get("more_us"), row.get("error_us")
            elif one["name"] == "inductor-again":
                more = row.get("again_us")
            layers = ", ".join(f"{name} {us:.1f}" for name, us in one.get("layers", {}).items())
            lines.append(
                f"{row['graph']:14}{row['mode']:7}{one['name']:15}{shown(one['us']):>8}"
                f"{shown(more):>8}{shown(sure):>6}{one['ours'] + one['inductors']:9}"
                f"{one['ours']:5}{one['fills']:6}{one['allocations']:12}{one['library']:8}"
                f"  {layers}"
            )
    return "\n".join(lines)


def shown(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def slower(rows: Iterable[dict], allowed: float = ALLOWED_US) -> list[str]:
    """The rows in which fusion's call surely takes the host longer than is allowed."""
    return [
        f"{row['graph']} {row['mode']}: {row['more_us']:.1f} µs more than plain Inductor"
        for row in rows
        if "more_us" in row and row["more_us"] - row["error_us"] > allowed
    ]
