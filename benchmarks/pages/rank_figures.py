"""The rows of a run of benchmarks.distributed as text, and what is wrong in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.pages import markdown
from benchmarks.records.runs import Run

# How far the mean of the last losses may be from plain Inductor's, of the first loss, or how many
# times as far as eager's is: all round in bf16, and training takes rounding errors further apart.
LOSS, EAGER = 0.02, 2.0
LAST = 10  # steps
# The ways in which each rank trains the whole model by itself, and the ways that are not compared
# with the first of them.
ALONE, BLOCKS = "alone", "alone-blocks"
COMPILED_ALIKE = {"fsdp-loss": BLOCKS}


def ratio(row: dict) -> float:
    """Plain Inductor's time over fusion's."""
    plain, ours = row["contenders"][:2]
    return plain["step"]["median"] / ours["step"]["median"]


def final_loss(contender: dict) -> float:
    return statistics.fmean(contender["losses"][-LAST:])


def apart(row: dict, other: dict) -> float:
    """How far another contender's loss is from plain Inductor's in the end, of the first."""
    plain = row["contenders"][0]
    return abs(final_loss(other) - final_loss(plain)) / abs(plain["losses"][0])


def astray(row: dict) -> bool:
    """Is fusion's loss further from plain Inductor's than rounding takes it? NaN is."""
    _, ours, *eager = row["contenders"]
    allowed = max([LOSS, *(EAGER * apart(row, one) for one in eager)])
    return not apart(row, ours) <= allowed


def share(row: dict, rows: Iterable[dict]) -> float | None:
    """How much of the gain of a single GPU is left (of what its ratio is above 1), where that was
    measured and gains: in the row of the same model, batch and number of ranks that is "alone", of
    as many steps if there is one. Where the blocks and the loss are compiled one by one, it is the
    row "alone-blocks". The other ways that compile blocks compile less than "alone" does.
    """
    how = row["wrapping"]
    other = COMPILED_ALIKE.get(how, ALONE)
    same = ("name", "world", "batch")
    ones = (one for one in rows if one["wrapping"] == other)
    alike = [one for one in ones if all(one[key] == row[key] for key in same)]
    alone = min(alike, key=lambda one: one["steps"] != row["steps"], default=None)
    if how in (ALONE, BLOCKS) or alone is None or ratio(alone) <= 1:
        return None
    return (ratio(row) - 1) / (ratio(alone) - 1)


HEADS = (
    "model", "ranks", "spread by", "steps", "plain Inductor ms", "fusion ms", "ratio", "noise",
    "of the gain alone", "peak GB", "kept GB", "loss (eager)", "graphs", "sites fused",
)  # fmt: skip


def ranks(run: Run, _: list[str]) -> str:
    return table(run.rows)


def table(rows: list[dict]) -> str:
    return markdown.table(HEADS, [cells(row, share(row, rows)) for row in rows])


def cells(row: dict, left: float | None) -> list[str]:
    plain, ours = both = row["contenders"][:2]
    found = [
        f"{row['name']} ({row['layers']} layers, width {row['width']}, batch {row['batch']})",
        row["world"],
        row["wrapping"],
        row["steps"],
        *(f"{one['step']['median']:.2f}" for one in both),
        f"{ratio(row):.3f}",
        f"{row['noise']:.1%}",
        "" if left is None else f"{round(left, 2) + 0.0:.0%}",  # no -0%
        " → ".join(f"{one['peak_bytes'] / 1e9:.2f}" for one in both),
        " → ".join(f"{one['saved_bytes'] / 1e9:.2f}" for one in both),
        " → ".join(f"{final_loss(one):.3f}" for one in both)
        + "".join(f" ({final_loss(one):.3f})" for one in row["contenders"][2:]),
        f"{plain['graphs']} → {ours['graphs']}",
        sum(ours["fused"].values()),
    ]
    return [*map(str, found)]


def wrong(rows: Iterable[dict]) -> list[str]:
    """A sentence for each row whose training went elsewhere, NaN among them. With dropout the
    losses of two trainings differ in any case.
    """
    return [
        f"{row['name']} {row['wrapping']}: after {row['steps']} steps the loss is "
        f"{final_loss(row['contenders'][1]):.3f}, plain Inductor's "
        f"{final_loss(row['contenders'][0]):.3f}"
        for row in rows
        if not row["dropout"] and astray(row)
    ]
