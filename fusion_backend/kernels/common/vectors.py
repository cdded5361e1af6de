"""A vector beside rows: the weight of a norm, or the scale of a sample."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_vector(VECTOR, col, n):
    """Numbers `col` `[BLOCK]` of a vector `[n]`, as a row `[1, BLOCK]`; 0 beyond its end.

    They are loaded in one dimension. Loaded as a row they would have a layout of their own, with
    fewer elements a thread, and the compiler would give it to the tiles that are computed with
    them: those would move through shared memory.
    """
    return tl.load(VECTOR + col, col < n, 0.0)[None, :]
