"""The table of the fastest configurations, as fusion_backend/kernels/common/tuned.py has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import triton

from benchmarks.records.runs import Run
from fusion_backend.kernels.common.rows import FEW
from fusion_backend.kernels.norm.backward import MAX_HELD_BACKWARD

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "fusion_backend" / "kernels" / "common" / "tuned.py"
FILES = ("sweeps.json", "sweep-products.json", "h100-sweep-specialised.json")
SWEEPS = [ROOT / "benchmarks" / "results" / f for f in FILES]
# layer_norm backward 16384x4096: rows of 4096
WORK = re.compile(r"(?P<kernel>\w[\w ]*) (?P<rows>\d+)x(?P<n>\d+)")
# linear gelu m=16384 k=1024 n=4096 (137.4 GFLOP): a product and its epilogue
PRODUCT = re.compile(r"(?P<what>(?:linear|gated) \w+) m=(?P<m>\d+) k=(?P<k>\d+) n=(?P<n>\d+).*")
HEAD = '''"""The fastest configurations for 16-bit elements, by kernel and row length.

Written by `python -m benchmarks.tune` from
{files}.
Measured on {gpu}, torch {torch}, triton {triton}.
A row length stands for all up to it, from the next smaller power of two on. What is not here
follows the rule in the kernel's own file.
"""

TABLE: dict[str, dict[int, dict[str, int]]] = {{
'''


TILES_HEAD = """
# Of matrix products, by their epilogue and the size of the weight: the numbers of a tile
# (kernels/gemm/tiles.py), or nothing where the library is the fastest.
PRODUCTS: dict[str, tuple[int, ...]] = {"""
PLAIN_HEAD = """
# The same for kernels without finishers.
WITHOUT_FINISHERS: dict[str, tuple[int, ...]] = {"""


def fastest(runs: list[Run]) -> dict[str, dict[int, dict[str, int]]]:
    """Kernel -> row length -> configuration, from its words. Of several pieces of work the largest
    counts.
    """
    best: dict[tuple[str, int], tuple[int, float, str]] = {}  # -> elements, milliseconds
    for row in (row for run in runs for row in run.rows):
        work = WORK.fullmatch(row["work"])
        # a configuration of a kernel that works on rows
        if work and "rows=" in row["config"].lower():
            rows, n = int(work["rows"]), int(work["n"])
            if work["kernel"].endswith("by columns") and n <= MAX_HELD_BACKWARD:
                continue  # the launcher takes the other kernel
            if work["kernel"].endswith(" shared"):
                continue  # its launcher has one configuration for all lengths
            key = work["kernel"] + ", few rows" * (rows < FEW), triton.next_power_of_2(n)
            found = -rows * n, row["ms"], row["config"]
            best[key] = min(best.get(key, found), found)
    table: dict[str, dict[int, dict[str, int]]] = {}
    for (kernel, n), (_, _, words) in sorted(best.items()):
        pairs = (word.split("=") for word in words.split())
        table.setdefault(kernel, {})[n] = {name.lower(): int(value) for name, value in pairs}
    return table


def fastest_tiles(runs: list[Run], finishers: bool = True) -> dict[str, tuple[int, ...]]:
    """Product, its epilogue and the size of its weight -> tile, or () for the library. Of several
    numbers of rows the largest counts, and of several runs the last, whose GPU may be another.
    finishers: also tiles that have them.
    """
    best: dict[str, tuple[int, float, str]] = {}  # -> -rows, milliseconds, configuration
    for run in runs:
        of_run: dict[str, tuple[int, float, str]] = {}
        for row in run.rows:
            work = PRODUCT.fullmatch(row["work"])
            apart = re.search(r"finishers=[1-9]", row["config"])
            if work and row["config"] != "product alone" and (finishers or not apart):
                key = "{what} {k}x{n}".format(**work.groupdict())
                found = -int(work["m"]), row["ms"], row["config"]
                of_run[key] = min(of_run.get(key, found), found)
        best |= of_run
    return {
        key: ()
        if config == "library"
        else tuple(int(word.partition("=")[2]) for word in config.split())
        for key, (_, _, config) in sorted(best.items())
    }


def named(file: Path) -> str:
    """As it is called from the root of the checkout."""
    file = file.resolve()
    return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name)


def written(runs: list[Run], files: list[Path]) -> str:
    """The text of the file."""
    table = fastest(runs)
    about = {
        name: ", ".join(sorted({str(run.about[name]) for run in runs}))
        for name in ("gpu", "torch", "triton")
    }
    lines = [HEAD.format(files=",\n".join(map(named, files)), **about)]
    for kernel, configs in table.items():
        lines.append(f'    "{kernel}": {{\n')
        lines += [f"        {n}: {json.dumps(config)},\n" for n, config in configs.items()]
        lines.append("    },\n")
    lines.append("}\n")
    for head, finishers in ((TILES_HEAD, True), (PLAIN_HEAD, False)):
        tiles = fastest_tiles(runs, finishers)
        lines += [head, "\n" if tiles else ""]
        lines += [f'    "{key}": {tile},\n' for key, tile in tiles.items()]
        lines.append("}\n")
    return "".join(lines)
