"""The rows of a run of benchmarks.tensor_parallel as text."""

from __future__ import annotations

from benchmarks.pages import markdown

HEADS = (
    "model", "ranks", "batch", "plain Inductor ms", "fusion ms", "all but the sums ms",
    "all sites ms", "ratios", "noise", "ratios by the host", "sites fused", "sums",
)  # fmt: skip
NONE = "–"


def table(rows: list[dict]) -> str:
    """Times of a step in CUDA graphs, where there are some; ratios of plain Inductor's time over
    the other three; "noise": of plain Inductor's time, measured twice; "sums": those over ranks
    that a kernel computes.
    """
    return markdown.table(HEADS, [cells(row) for row in rows])


def cells(row: dict) -> list[str]:
    ours = row["contenders"][1:-1]
    graphs, calls = ([time(one, how) for one in row["contenders"]] for how in ("graph", "call"))
    noise = NONE if None in (graphs[0], graphs[-1]) else f"{abs(graphs[-1] / graphs[0] - 1):.1%}"
    return [
        f"{row['name']} ({row['layers']} layers, width {row['width']}, {row['seq']} tokens)",
        str(row["world"]),
        str(row["batch"]),
        *(NONE if ms is None else f"{ms:.3f}" for ms in graphs[:-1]),
        ratios(graphs[:-1]),
        noise,
        ratios(calls[:-1]),
        ", ".join(str(sum(one["fused"].values())) for one in ours),
        str(ours[-1]["sums"]),
    ]


def time(one: dict, how: str) -> float | None:
    return one[how]["median"] if how in one else None


def ratios(times: list[float | None]) -> str:
    """Of the first over the others."""
    first, *others = times
    return ", ".join(
        NONE if first is None or other is None else f"{first / other:.3f}" for other in others
    )
