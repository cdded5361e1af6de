"""Pictures of a run of the benchmarks, as PNG.

    for name, title, png in plots(Run.load(path)): Path(f"{name}.png").write_bytes(png)

Needs matplotlib (in the extra "bench").
"""

from __future__ import annotations

from benchmarks.pages.block_plots import block_sizes
from benchmarks.pages.model_plots import kernel_shares, model_memory, steps
from benchmarks.pages.pattern_plots import memory, roofline, speed_up
from benchmarks.records.runs import Run


def plots(run: Run) -> list[tuple[str, str, bytes]]:
    """(file name, title, PNG) of every picture that the run has data for."""
    kinds = {
        "patterns": [
            ("roofline", "Roofline", roofline),
            ("speed-up", "Speed-up over size", speed_up),
            ("memory", "Memory", memory),
        ],
        "models": [
            ("steps", "Step times", steps),
            ("shares", "Where the time goes", kernel_shares),
            ("memory", "Memory", model_memory),
        ],
    }
    found = [(name, title, draw(run)) for name, title, draw in kinds.get(run.kind, ())]
    if run.kind == "block_size":
        found = [(f"block-{i}", work, data) for i, (work, data) in enumerate(block_sizes(run))]
    return [picture for picture in found if picture[2] is not None]
