"""What the kernels of matrix products share: tiles in the order in which programs take them, and
descriptors of the operands.

A program asks the tensor memory accelerator for whole tiles: a descriptor in memory says where a
matrix is, and what lies beyond its edge is read as zero and not written. Descriptors are made on
the GPU, by each program for itself: made by the host, they cost 10 to 20 µs a launch. GPUs before
Hopper have none, and Triton computes addresses instead.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def corner(tile, m, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column of a tile of the result. Neighbours share rows of x and columns of
    the weight: GROUP tiles down, then one to the right.
    """
    down = tl.cdiv(m, BM)
    across: tl.constexpr = (N + BN - 1) // BN
    group = tile // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    rest = tile % (GROUP * across)
    return (group * GROUP + rest % height) * BM, rest // height * BN


@triton.jit
def weight_matrix(
    W, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, BY_OUTPUT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A descriptor of a weight [K, N]. BY_OUTPUT: it lies in memory as that of a linear layer does,
    a row for each output.
    """
    if BY_OUTPUT:
        matrix = tl.make_tensor_descriptor(W, [N, K], [STRIDE, 1], [BN, BK])
    else:
        matrix = tl.make_tensor_descriptor(W, [K, N], [STRIDE, 1], [BK, BN])
    return matrix


@triton.jit
def weight_tile(matrix, start, left, BY_OUTPUT: tl.constexpr):
    """The tile `[BK, BN]` of a weight."""
    if BY_OUTPUT:
        tile = matrix.load([left, start]).T
    else:
        tile = matrix.load([start, left])
    return tile


@triton.jit
def multiply(x, w, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """total + x w."""
    if UPCAST:  # Triton's interpreter multiplies bf16 wrongly
        x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total.to(tl.float32)).to(total.dtype)
    else:
        total = tl.dot(x, w, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile. A tile that is stored in halves needs half the shared
    memory, so that two programs fit on a multiprocessor: one multiplies while the other stores.
    """
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
