"""The rows of a run of benchmarks.tensor_parallel as text."""

from __future__ import annotations

from benchmarks.pages import markdown

HEADS = (
    "model", "ranks", "batch", "plain Inductor ms", "fusion ms", "ratio", "with all sites ms",
    "ratio", "noise", "by the host", "sites fused",
)  # fmt: skip


def table(rows: list[dict]) -> str:
    """Times of a step in CUDA graphs, or by the host where there are none; "by the host": the
    ratios there; "noise": of plain Inductor's time, measured twice.
    """
    return markdown.table(HEADS, [cells(row) for row in rows])


def cells(row: dict) -> list[str]:
    plain, ours, everything, again = row["contenders"]
    how = "graph" if "graph" in plain else "call"
    first, second, third, twin = (one[how]["median"] for one in (plain, ours, everything, again))
    host = [plain["call"]["median"] / one["call"]["median"] for one in (ours, everything)]
    return [
        f"{row['name']} ({row['layers']} layers, width {row['width']}, {row['seq']} tokens)",
        str(row["world"]),
        str(row["batch"]),
        f"{first:.3f}",
        f"{second:.3f}",
        f"{first / second:.3f}",
        f"{third:.3f}",
        f"{first / third:.3f}",
        f"{abs(twin / first - 1):.1%}",
        ", ".join(f"{ratio:.3f}" for ratio in host),
        ", ".join(str(sum(one["fused"].values())) for one in (ours, everything)),
    ]
