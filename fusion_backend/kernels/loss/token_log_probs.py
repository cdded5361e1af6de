"""Log-probabilities of given tokens, and their gradient.

With y = scale · x, out = y of the token - log Σ e^y; the gradient of x is scale · (onehot -
softmax(y)) · that of out. Sums in fp32. Rows are read where they lie: as slices of sequences and
transposed batches have them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.kernels.common.launch import assert_all, launch
from fusion_backend.kernels.loss.cross_entropy import config, sums_config


class Rows(NamedTuple):
    """Where the rows of a tensor begin: row i at (i // length · outer + i % length · inner) · unit.
    Only the unit is a number in any case; from it Triton knows how wide its loads may be.
    """

    outer: Any
    inner: Any
    unit: int


def rows_of(*tensors: Tensor) -> tuple[Any, list[Rows]] | None:
    """The length that splits the rows of tensors of one shape, and where they lie in each. None
    where they are not so regular, or no distance is a number.
    """
    groups: list[list] = []  # of dimensions that can be walked through as one: size, strides
    for d in range(tensors[0].dim() - 1):
        size = number(tensors[0].shape[d])
        if statically_known_true(size == 1):
            continue
        steps = [number(t.stride(d)) for t in tensors]
        before = groups[-1][1:] if groups else ()
        if before and all(
            statically_known_true(b == step * size) for b, step in zip(before, steps, strict=True)
        ):
            groups[-1] = [groups[-1][0] * size, *steps]
        else:
            groups.append([size, *steps])
    if len(groups) > 2:
        return None
    nothing = [1] + [0] * len(tensors)
    outer, inner = [nothing] * (2 - len(groups)) + groups
    found = [in_units(*pair) for pair in zip(outer[1:], inner[1:], strict=True)]
    return None if None in found else (inner[0], found)


def in_units(outer, inner) -> Rows | None:
    known = [step for step in (outer, inner) if not dynamic(step)]
    if len(known) == 2:
        unit = math.gcd(outer, inner) or 1
        return Rows(outer // unit, inner // unit, unit)
    for unit in known:
        if unit and all(statically_known_true(step % unit == 0) for step in (outer, inner)):
            return Rows(outer // unit, inner // unit, unit)
    return None


def check(index: Tensor, classes: int, first: int = 0) -> None:
    """An id before the first, or that is no class, is an assertion on the device, as torch.gather
    has it.
    """
    assert_all((index >= first) & (index < classes), "token_log_probs: an index is out of bounds")


def forward(
    x: Tensor, index: Tensor, dtype: torch.dtype, wraps: bool, infinite: float, scale: float = 1.0,
    how: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The log-probability of each row's token in `dtype`, `[rows]`, and what the gradient reads in
    fp32, `[2, rows]`: with y = scale · x, the largest y (0 for an infinite one), and the logarithm
    of the sum of the e^(y - that). Their own sum would be rounded, which is worse than eager for
    large logits.

    x is `[..., v]` in fp32, bf16 or fp16, its columns one element apart; index int64, with as many
    elements as there are rows, taken modulo v where it `wraps`. With an infinite logit the
    logarithm is `infinite`. how: lanes, logits a lane and warps. Grid: rows.
    """
    v, rows = number(x.shape[-1]), index.numel()
    lanes, each, warps = how or sums_config(v, 4 if v <= 4096 else 8)
    found = rows_of(x)
    x = x if found else x.contiguous()
    length, ((outer, inner, unit),) = found or rows_of(x)
    out = torch.empty(rows, dtype=dtype, device=x.device)
    sums = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    launch(
        token_log_probs_kernel, (rows,), x, index.contiguous(), out, sums, length, outer, inner,
        scale, UNIT=unit, V=v, LANES=lanes, LOGITS=each, WRAPS=wraps, INFINITE=math.isinf(infinite),
        num_warps=warps,
    )  # fmt: skip
    return out, sums


def backward(
    dout: Tensor, x: Tensor, index: Tensor, sums: Tensor, wraps: bool, scale: float = 1.0,
    how: tuple[int, int, int] = (8192, 16, 1),
) -> Tensor:  # fmt: skip
    """The gradient of x, in its dtype; in its layout where that is dense and static, otherwise
    contiguous.

    dout has as many elements as there are rows, in any layout; x, index and sums as in the forward.
    how: columns a step, warps and stages. Grid: rows.
    """
    v = number(x.shape[-1])
    contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
    any_size = any(map(dynamic, (*x.shape, *x.stride())))
    dx = contiguous(x) if any_size else torch.empty_like(x)
    if v > 1 and not statically_known_true(dx.stride(-1) == 1):  # x has rows that overlap
        dx = contiguous(x)
    found = rows_of(x, dx)
    if not found:
        x, dx = x.contiguous(), contiguous(x)
    length, ((outer, inner, unit), (d_outer, d_inner, d_unit)) = found or rows_of(x, dx)
    launch(
        token_log_probs_backward_kernel, (index.numel(),),
        dout.contiguous(), x, index.contiguous(), sums, dx,
        length, outer, inner, d_outer, d_inner, scale,
        UNIT=unit, D_UNIT=d_unit, V=v, WRAPS=wraps, **config(v, *how),
    )  # fmt: skip
    return dx


@triton.jit
def first_of_row(row, length, outer, inner, UNIT: tl.constexpr):
    return (row // length * outer + row % length * inner) * UNIT


@triton.jit
def token_of_row(INDEX, row, V: tl.constexpr, WRAPS: tl.constexpr):
    token = tl.load(INDEX + row)
    if WRAPS:
        token %= V
        token += tl.where(token < 0, V, 0)
    return token


@triton.jit
def accumulate(x, tops, sums):
    """The largest value of each lane and its sum of e^(x - top), with the rows of x `[LOGITS,
    LANES]`. Unlike cross_entropy's, it subtracts before it scales, which keeps large logits exact,
    and for an infinite top it is the sum of the e^x, which tells infinite rows from NaN.
    """
    top = tl.maximum(tops, tl.max(x, 0))
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    e = tl.exp2((x - shift[None, :]) * 1.4426950408889634)
    # of a finite shift: -inf - shift is -inf, and the sum of nothing stays 0
    return top, sums * tl.exp2((tops - shift) * 1.4426950408889634) + tl.sum(e, 0)


@triton.jit
def sums_of_row(X, scale, V: tl.constexpr, LANES: tl.constexpr, LOGITS: tl.constexpr):
    """Of y = scale · x: the largest of a row (0 if it is infinite), and the sum of e^(y - that)."""
    col = tl.arange(0, LOGITS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tops = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    WHOLE: tl.constexpr = V // (LOGITS * LANES) * (LOGITS * LANES)
    for start in tl.range(0, WHOLE, LOGITS * LANES):
        tops, sums = accumulate(tl.load(X + start + col).to(tl.float32) * scale, tops, sums)
    if WHOLE < V:
        x = tl.load(X + WHOLE + col, WHOLE + col < V, 0.0).to(tl.float32) * scale
        x = tl.where(WHOLE + col < V, x, float("-inf"))
        tops, sums = accumulate(x, tops, sums)
    top = tl.max(tops)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return shift, tl.sum(sums * tl.exp2((tops - shift) * 1.4426950408889634))


# Bytes: logits once.
@triton.jit
def token_log_probs_kernel(
    X, INDEX, OUT, SUMS, length, outer, inner, scale,
    UNIT: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr, LOGITS: tl.constexpr,
    WRAPS: tl.constexpr, INFINITE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += first_of_row(row, length, outer, inner, UNIT)
    scale = tl.cast(scale, tl.float32)
    top, sum = sums_of_row(X, scale, V, LANES, LOGITS)
    if not INFINITE:
        sum = tl.where(sum == float("inf"), float("nan"), sum)
    token = token_of_row(INDEX, row, V, WRAPS)
    logit = tl.load(X + token, (token >= 0) & (token < V), float("nan")).to(tl.float32)
    logit *= scale
    tl.store(OUT + row, logit - top - tl.log(sum))
    tl.store(SUMS + row, top)
    tl.store(SUMS + tl.num_programs(0) + row, tl.log(sum))


# Bytes: logits once, their gradient once.
@triton.jit
def token_log_probs_backward_kernel(
    DOUT, X, INDEX, SUMS, DX, length, outer, inner, d_outer, d_inner, scale,
    UNIT: tl.constexpr, D_UNIT: tl.constexpr, V: tl.constexpr, WRAPS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += first_of_row(row, length, outer, inner, UNIT)
    DX += first_of_row(row, length, d_outer, d_inner, D_UNIT)
    token = token_of_row(INDEX, row, V, WRAPS)
    d, top = tl.load(DOUT + row).to(tl.float32), tl.load(SUMS + row)
    log = tl.load(SUMS + tl.num_programs(0) + row)
    # The logits of a token that the loss leaves out are not read: their gradient is 0, unless the
    # sum shows that one of them is no number.
    wanted = (d != 0.0) | (log != log) | (tl.abs(log) == float("inf"))
    read = wanted.to(tl.int32) != 0  # the interpreter spreads no comparison of floats
    scale = tl.cast(scale, tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        col = start + lane
        x = tl.load(X + col, (col < V) & read, 0.0).to(tl.float32) * scale
        p = tl.exp2((x - top - log) * 1.4426950408889634)
        dx = tl.where(read, tl.where(col == token, d, 0.0) - p * d, 0.0)
        tl.store(DX + col, dx * scale, col < V)
