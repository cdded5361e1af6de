"""What generated kernels call: operations over the elements of rows that a program holds."""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.activations import exp


@triton.jit
def row_sum(x, inside):
    """The sum of each row, `[rows, 1]`; inside: which columns are part of it."""
    return tl.sum(tl.where(inside, x, 0.0), 1, keep_dims=True)


@triton.jit
def row_softmax(x, inside):
    x = tl.where(inside, x, float("-inf"))
    e = exp(x - tl.max(x, 1, keep_dims=True))
    return e / tl.sum(e, 1, keep_dims=True)
