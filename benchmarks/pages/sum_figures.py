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
HOW = ("graph", "call")  # in a CUDA graph, and by the host


def sums(run: Run, _: list[str]) -> str:
    """Times in CUDA graphs. "ratio": NCCL's over that of the kernel that is taken at this size;
    "again": over NCCL's again.
    """
    return markdown.table(HEADS, [cells(row) for row in run.rows])


def cells(row: dict) -> list[str]:
    graphs, calls = ([c[how]["median"] * 1e3 for c in row["contenders"]] for how in HOW)
    nccl, *shots, again = graphs
    taken = int(takes_two_shots(row["world"], row["bytes"]))
    size = row["bytes"] // KB
    return [
        str(row["world"]),
        f"{size} KB" if size < KB else f"{size // KB} MB",
        f"{row['rows']} × {row['n']}",
        *(f"{us:.1f}" for us in (nccl, *shots)),
        f"{nccl / shots[taken]:.2f}",
        f"{nccl / again:.2f}",
        f"{calls[0]:.0f} → {calls[1 + taken]:.0f}",
    ]
