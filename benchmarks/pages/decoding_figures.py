"""The rows of a run of benchmarks.tensor_parallel as text."""

from __future__ import annotations

from benchmarks.pages import markdown
from benchmarks.records.runs import Run

HEADS = (
    "model", "ranks", "batch", "plain Inductor ms", "fusion ms", "all but the sums ms",
    "all sites ms", "ratios", "noise", "ratios by the host", "noise", "sites fused", "sums",
)  # fmt: skip
NONE = "–"


def decoding(run: Run, _: list[str]) -> str:
    """Times of a step in CUDA graphs, where there are some; ratios of plain Inductor's time over
    the other three; "noise": of plain Inductor's time, measured twice; "sums": those over ranks
    that a kernel computes.
    """
    return markdown.table(HEADS, [cells(row) for row in run.rows])


def cells(row: dict) -> list[str]:
    ours = row["contenders"][1:-1]
    graphs, calls = ([time(one, how) for one in row["contenders"]] for how in ("graph", "call"))
    return [
        f"{row['name']} ({row['layers']} layers, width {row['width']}, {row['seq']} tokens)",
        str(row["world"]),
        str(row["batch"]),
        *(NONE if ms is None else f"{ms:.3f}" for ms in graphs[:-1]),
        ratios(graphs[:-1]),
        noise(graphs),
        ratios(calls[:-1]),
        noise(calls),
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


def noise(times: list[float | None]) -> str:
    """How much the last, which is the first measured again, differs from it."""
    first, *_, again = times
    return NONE if first is None or again is None else f"{abs(again / first - 1):.1%}"
