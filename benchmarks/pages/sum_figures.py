"""The rows of a run of benchmarks.all_reduce as text."""

from __future__ import annotations

from benchmarks.pages import markdown
from benchmarks.records.runs import Run

HEADS = (
    "ranks", "x of a rank", "rows", "NCCL + Inductor µs", "one shot µs", "two shots µs", "ratio",
    "again", "by the host µs",
)  # fmt: skip
KB = 1 << 10


def sums(run: Run, _: list[str]) -> str:
    """Times in CUDA graphs. "ratio": NCCL's over that of one shot; "again": over NCCL's again."""
    return markdown.table(HEADS, [cells(row) for row in run.rows])


def cells(row: dict) -> list[str]:
    nccl, one, two, again = (c["graph"]["median"] * 1e3 for c in row["contenders"])
    hosts = [c["call"]["median"] * 1e3 for c in row["contenders"][:2]]
    size = row["bytes"] // KB
    return [
        str(row["world"]),
        f"{size} KB" if size < KB else f"{size // KB} MB",
        f"{row['rows']} × {row['n']}",
        *(f"{us:.1f}" for us in (nccl, one, two)),
        f"{nccl / one:.2f}",
        f"{nccl / again:.2f}",
        " → ".join(f"{us:.0f}" for us in hosts),
    ]
