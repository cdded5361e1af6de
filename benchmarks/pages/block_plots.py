"""Pictures of a run of benchmarks.block_size."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.drawing import LABEL, colour, png, pyplot, where
from benchmarks.records.rows import BlockRow
from benchmarks.records.runs import Run


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def block_sizes(run: Run) -> Iterator[tuple[str, bytes]]:
    """A picture a piece of work: GB/s of each configuration, beside eager and plain Inductor."""
    works: dict[str, list[BlockRow]] = {}
    for row in run.rows:
        works.setdefault(row.work, []).append(row)
    for work, rows in works.items():
        kernel = [row for row in rows if row.who == "kernel" and row.rate_bytes]
        if not kernel:
            continue
        plt = pyplot()
        blocks = sorted({row.block for row in kernel})
        warps = sorted({row.warps for row in kernel})
        figure, axes = plt.subplots(figsize=(max(7, 0.62 * len(kernel) + 1.5), 4.4))
        shades = plt.get_cmap("viridis")
        width = 0.86 / len(warps)
        for i, warp in enumerate(warps):
            mine = [row for row in kernel if row.warps == warp]
            places = [blocks.index(row.block) + (i - (len(warps) - 1) / 2) * width for row in mine]
            drawn = axes.bar(
                places,
                [row.rate_bytes / 1e9 for row in mine],
                width * 0.94,
                label=f"num_warps {warp}",
                color=shades(0.15 + 0.7 * i / max(1, len(warps) - 1)),
                edgecolor=["#D55E00" if row.chosen else "none" for row in mine],
                linewidth=2,
            )
            axes.bar_label(
                drawn, [number(row.rate_bytes / 1e9) for row in mine], rotation=90, **LABEL
            )
        tall = max(row.rate_bytes for row in rows if row.rate_bytes) / 1e9
        for row in rows:
            if row.who != "kernel" and row.rate_bytes:
                axes.axhline(
                    row.rate_bytes / 1e9,
                    color=colour(row.who),
                    ls="--",
                    lw=1.4,
                    zorder=0.5,
                    label=f"{row.who} {number(row.rate_bytes / 1e9)}",
                )
        chosen = " (framed: what the launcher takes)" if any(row.chosen for row in kernel) else ""
        axes.set_xticks(range(len(blocks)), blocks)
        axes.set(ylim=(0, tall * 1.2), xlabel=f"BLOCK_SIZE{chosen}", ylabel="GB/s")
        axes.grid(axis="x", visible=False)
        figure.suptitle(f"{work}: {where(run)}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        yield work, png(figure)
