"""The rows of a run as text, and what is wrong in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

# How far the mean of the last losses may be from plain Inductor's, of the first loss: both round in
# bf16, training takes rounding errors further apart, and dropout drops other elements.
LOSS = 0.02
LAST = 10  # steps


def ratio(row: dict) -> float:
    """Plain Inductor's time over fusion's."""
    plain, ours = row["contenders"]
    return plain["step"]["median"] / ours["step"]["median"]


def final_loss(contender: dict) -> float:
    return statistics.fmean(contender["losses"][-LAST:])


def apart(row: dict) -> float:
    """How far the losses are apart in the end, of the first."""
    plain, ours = row["contenders"]
    return abs(final_loss(ours) - final_loss(plain)) / abs(plain["losses"][0])


def table(rows: Iterable[dict]) -> str:
    lines = [
        "| model | ranks | spread by | plain Inductor ms | fusion ms | ratio | noise | peak GB "
        "| kept GB | loss | graphs | sites fused |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        plain, ours = row["contenders"]
        both = [
            f"{row['name']} ({row['layers']} layers, width {row['width']})",
            row["world"],
            row["wrapping"],
            *(f"{one['step']['median']:.2f}" for one in (plain, ours)),
            f"{ratio(row):.3f}",
            f"{row['noise']:.1%}",
            " → ".join(f"{one['peak_bytes'] / 1e9:.2f}" for one in (plain, ours)),
            " → ".join(f"{one['saved_bytes'] / 1e9:.2f}" for one in (plain, ours)),
            " → ".join(f"{final_loss(one):.3f}" for one in (plain, ours)),
            " → ".join(str(one["graphs"]) for one in (plain, ours)),
            sum(ours["fused"].values()),
        ]
        lines.append("| " + " | ".join(map(str, both)) + " |")
    return "\n".join(lines)


def wrong(rows: Iterable[dict]) -> list[str]:
    """A sentence for each row whose training went elsewhere, NaN among them."""
    return [
        f"{row['name']} {row['wrapping']}: after {row['steps']} steps the loss is "
        f"{final_loss(row['contenders'][1]):.3f}, plain Inductor's "
        f"{final_loss(row['contenders'][0]):.3f}"
        for row in rows
        if not apart(row) <= LOSS
    ]
