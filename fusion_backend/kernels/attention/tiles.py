"""What the attention kernels do with a tile of scores.

A tile is at the queries i0, ... and the keys j0, ...; `row` and `col` count from there, and stand
in either order: the gradients of k and v have their scores transposed. `masks` is what a kernel
knows of the scores of one head, (bias, keep, keys, band, seed, head):

    bias         a pointer, its strides (batch, head, row, column), and its period: None, or
                 batches that are so far apart share a bias; or the tile itself, None and None
    keep         a pointer and its strides (batch, head, row, column)
    keys         a pointer and its strides (batch, column)
    band         (low, high)
    seed         the number of the seed
    head         (batch, head, heads, n, m): which of how many, with how many queries and keys

Pointers, bounds and the seed are None where there is none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.common.dropout import tile_survives


@triton.jit
def row_pointer(P, strides, batch, head, row):
    """Where a row of a head begins; the strides of batch, head and row come first."""
    return P + batch * strides[0] + head * strides[1] + tl.cast(row, tl.int64) * strides[2]


@triton.jit
def program_part(parts, bias_heads):
    """Of this program of short attention: the first batch and head of those that share a bias, and
    which part of them it has.
    """
    shared = tl.program_id(0) // parts
    batch, head = (shared // bias_heads).to(tl.int64), (shared % bias_heads).to(tl.int64)
    return batch, head, tl.program_id(0) % parts


@triton.jit
def bias_tile(BIAS, strides, batch, head, query, key):
    """Of the bias with these strides: the numbers of queries and keys of one head."""
    BIAS += batch * strides[0] + head * strides[1]
    return tl.load(BIAS + query[:, None] * strides[2] + key[None, :] * strides[3])


@triton.jit
def load_rows(P, at, stride, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of D numbers as `[rows, BD]`, 0 beyond D."""
    d = tl.arange(0, BD)[None, :]
    if D == BD:
        x = tl.load(P + at[:, None] * stride + d)
    else:
        x = tl.load(P + at[:, None] * stride + d, d < D, 0.0)
    return x.to(tl.float32) if UPCAST else x  # the interpreter multiplies bf16 wrongly


@triton.jit
def rows_of_head(
    P, strides, batch, head, at, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr
):
    """Rows `at` of a head, as load_rows; the strides of batch, head and row."""
    return load_rows(row_pointer(P, strides, batch, head, 0), at, strides[2], D, BD, UPCAST)


@triton.jit
def scores(s, BIAS, i, j, bias_row, bias_col, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Products as scores: scaled, capped, with their bias, which is read at i and j if it has
    strides.
    """
    BASE: tl.constexpr = 1.4426950408889634 if BIAS is None else 1.0
    s = s * (SCALE * BASE) if CAP is None else capped(s, SCALE, CAP) * (CAP * BASE)
    if BIAS is not None:
        tile = BIAS if bias_row is None else tl.load(BIAS + i * bias_row + j * bias_col)
        s += tile.to(tl.float32)
    return s


@triton.jit
def exponential(x, BIAS):
    """2^x, or with a bias e^x: the base in which scores are."""
    return tl.exp2(x) if BIAS is None else tl.exp2(x * 1.4426950408889634)


@triton.jit
def capped(s, SCALE: tl.constexpr, CAP: tl.constexpr):
    """tanh(scale · s / cap)"""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * SCALE / CAP * 1.4426950408889634)))


@triton.jit
def masked(
    s, masks, row, col, i0, j0,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, KEYS_ARE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Products as scores, and which are seen. Without MASKED a dense choice alone decides that."""
    bias, keep, keys, band, seed, at = masks  # Triton 3.6 takes no nested target
    BIAS, bias_strides, period = bias
    KEEP, keep_strides = keep
    KEYS, keys_strides = keys
    batch, head, heads, n, m = at
    low, high = band
    i = tl.minimum(row, n - 1 - i0)
    j = tl.minimum(col, m - 1 - j0) if MASKED else col
    if BIAS is None or bias_strides is None:
        s = scores(s, BIAS, i, j, None, None, SCALE, CAP)
    else:
        bias_row, bias_col = bias_strides[2], bias_strides[3]
        of_bias = batch if period is None else batch % period
        BIAS = row_pointer(BIAS, bias_strides, of_bias, head, i0) + tl.cast(j0, tl.int64) * bias_col
        s = scores(s, BIAS, i, j, bias_row, bias_col, SCALE, CAP)
    if KEYS_ARE == "added":
        ADDED = KEYS + batch * keys_strides[0] + tl.cast(j0, tl.int64) * keys_strides[1]
        s += tl.load(ADDED + j * keys_strides[1]).to(tl.float32)
    visible = row + col >= 0
    if KEEP is not None:
        keep_row, keep_col = keep_strides[2], keep_strides[3]
        KEEP = row_pointer(KEEP, keep_strides, batch, head, i0) + tl.cast(j0, tl.int64) * keep_col
        visible = tl.load(KEEP + i * keep_row + j * keep_col) != 0
    if MASKED:
        if KEYS is not None and KEYS_ARE != "added":
            KEYS += batch * keys_strides[0]
            of_query = KEYS + tl.cast(i0, tl.int64) * keys_strides[1] + i * keys_strides[1]
            KEYS += tl.cast(j0, tl.int64) * keys_strides[1]
            of_key = tl.load(KEYS + j * keys_strides[1])
            if KEYS_ARE == "documents":
                visible = visible & (of_key == tl.load(of_query))
            else:
                visible = visible & ((of_key != 0) != (KEYS_ARE == "padding"))
        # One comparison a score: its key with the last key that its query sees.
        if low is not None:
            last = row + (i0 - j0 - low)
            last = last if FILL is not None else tl.minimum(last, m - 1 - j0)
            visible = visible & (col <= last)
        elif FILL is None:
            visible = visible & (col < m - j0)
        if high is not None:
            visible = visible & (col >= row + (i0 - j0 - high))
    if MASKED or KEEP is not None:
        s = tl.where(visible, s, float("-inf") if FILL is None else FILL)
        if MASKED and FILL is not None:
            s = tl.where(col < m - j0, s, float("-inf"))
    return s, visible


@triton.jit
def survivors(
    masks, i0, j0, BM: tl.constexpr, BN: tl.constexpr, THRESHOLD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which probabilities of a tile dropout leaves."""
    bias, keep, keys, band, seed, at = masks
    batch, head, heads, n, m = at
    row = (batch * heads + head).to(tl.int32) * (tl.cdiv(n, 16) * 8) + i0 // 2
    return tile_survives(seed, row, j0 // 2, BM, BN, THRESHOLD, TRANSPOSED)
