"""Elementwise kernels: a program for each block of a tensor's elements, in the order of
its memory.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def blocks_of(size: Any, block: int) -> tuple[tuple[Any], Any]:
    """The grid of an elementwise kernel over `size` elements, and how many of them its last program
    has. The number of all may take more than the 32 bits that Inductor passes to kernels.
    """
    programs = (size + block - 1) // block
    return (programs,), size - (programs - 1) * block


@triton.jit
def block_of(last, BLOCK: tl.constexpr):
    """In a kernel: the first element of this program, and how many it has; `last` is the number
    from `blocks_of`.
    """
    ends = tl.program_id(0) == tl.num_programs(0) - 1
    return tl.program_id(0).to(tl.int64) * BLOCK, tl.where(ends, last, BLOCK)
