"""In which layouts a kernel computes with its tiles."""

from __future__ import annotations

import re
from collections import defaultdict

ARITHMETIC = re.compile(r"arith\.(?:add|sub|mul)f .*: tensor<(\d+)x(\d+)xf32, #(blocked\d*)>")
RESHAPED = re.compile(
    r"tt\.reshape %\S+ allow_reorder efficient_layout : tensor<([\dx]+)x\w+, #(\w+)> -> "
)
ORDER = re.compile(r"^#(\w+) = #ttg\.blocked<\{.*order = \[([\d, ]+)\]", re.MULTILINE)
LEAST = 512  # elements of a tile that matters: what lies beside rows has fewer, or one row


def torn_tiles(code: str) -> list[tuple[int, int]]:
    """The shapes of the tiles that Triton's GPU code adds or multiplies in more than one layout, so
    that they move through shared memory in between. Kernels of matrix products are left out: the
    product has a layout of its own.
    """
    if "tt.dot" in code:
        return []
    layouts = defaultdict(set)
    for rows, columns, layout in ARITHMETIC.findall(code):
        layouts[int(rows), int(columns)].add(layout)
    return [
        shape
        for shape, found in layouts.items()
        if len(found) > 1 and min(shape) > 1 and shape[0] * shape[1] >= LEAST
    ]


def mixed_tiles(code: str) -> list[tuple[int, ...]]:
    """The shapes of the tiles whose rows Triton mixes up when it adds them up in a loop.

    Where a tile was just loaded, and its rows are summed onto a vector, Triton first sums what each
    thread holds (`tritongpu-optimize-thread-locality`). It takes the elements row after row, also
    if the thread holds them column after column.
    """
    order = {name: [*map(int, dims.split(","))] for name, dims in ORDER.findall(code)}
    found = [(tuple(map(int, shape.split("x"))), name) for shape, name in RESHAPED.findall(code)]
    return [shape for shape, name in found if order[name][0] != len(shape) - 1]
