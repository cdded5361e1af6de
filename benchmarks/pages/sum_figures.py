"""The rows of a run of benchmarks.all_reduce as text."""

from __future__ import annotations

from benchmarks.pages import markdown
from benchmarks.records.runs import Run
from fusion_backend.kernels.collective.size_gate import takes_two_shots

HEADS = (
    "ranks", "x of a rank", "rows", "NCCL + Inductor µs", "one shot µs", "two shots µs", "ratio",
    "again", "by the host µs",
)  # fmt: skip
KB = 1 << 10


def sums(run: Run, _: list[str]) -> str:
    """Times in CUDA graphs. "ratio": NCCL's over that of the kernel that is taken at this size;
    "again": over NCCL's again.
    """
    return markdown.table(HEADS, [cells(row) for row in run.rows])


def cells(row: dict) -> list[str]:
    nccl, one, two, again = (c["graph"]["median"] * 1e3 for c in row["contenders"])
    taken = 2 if takes_two_shots(row["world"], row["bytes"]) else 1
    hosts = [row["contenders"][i]["call"]["median"] * 1e3 for i in (0, taken)]
    size = row["bytes"] // KB
    return [
        str(row["world"]),
        f"{size} KB" if size < KB else f"{size // KB} MB",
        f"{row['rows']} × {row['n']}",
        *(f"{us:.1f}" for us in (nccl, one, two)),
        f"{nccl / (one, two)[taken - 1]:.2f}",
        f"{nccl / again:.2f}",
        " → ".join(f"{us:.0f}" for us in hosts),
    ]
