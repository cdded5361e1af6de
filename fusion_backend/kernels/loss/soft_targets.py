"""Losses of rows of logits against probabilities, and their gradients.

With q = softmax(scale · x) and p the probabilities, the cross entropy is -Σ p log q, and the
divergence Σ p (log p - log q). p is given, or the softmax of other logits, a teacher's; given
probabilities may be smoothed, p (1 - s) + s / v, and multiplied by weights of the classes. Each row
is read once, forward and backward; sums in fp32. Where p is 0, the gradient of a teacher's logit is
0, and that of a given p in a divergence infinite; eager's are NaN there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import dynamic, number, reject_dtypes, same_sizes
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.loss.channel_cross_entropy import finite
from fusion_backend.kernels.loss.cross_entropy import config, reject_weight
from fusion_backend.kernels.loss.token_log_probs import first_of_row, rows_of
from fusion_backend.reporting.reject import Reject


class Target(NamedTuple):
    """What the logits x are compared with.

    y: `[..., v]`, as x: the probabilities, or with `teacher` the logits that give them.
    weight: `[v]`, contiguous, or None; only of given probabilities, as smoothing.
    divergence: are the logarithms of the probabilities in the loss?
    zeros: does a probability of 0 add nothing to a divergence? If not, a teacher's logit of
    -infinity makes it NaN.
    """

    y: Tensor
    scale: float = 1.0
    teacher: bool = False
    teacher_scale: float = 1.0
    divergence: bool = False
    zeros: bool = True
    weight: Tensor | None = None
    smoothing: float = 0.0

    def constants(self) -> dict:
        return dict(
            TEACHER=self.teacher, DIVERGENCE=self.divergence, ZEROS=self.zeros,
            SMOOTH=self.smoothing != 0.0,
        )  # fmt: skip

    def numbers(self) -> tuple:
        return self.scale, self.teacher_scale, self.smoothing


def reject_operands(
    logits: Tensor, name: str, other: Tensor, weight: Tensor | None = None
) -> Reject | None:
    """Refuse rows that are not of one static length, with their columns next to each other, and
    weights that are not a dense vector.
    """
    for which, t in (("logits", logits), (name, other)):
        if not t.dim():
            return Reject(f"{which} is a single number")
        if dynamic(t.shape[-1]) or number(t.shape[-1]) == 0:
            return Reject(f"the number of classes of {which} is dynamic, or 0")
        if number(t.shape[-1]) > 1 and (dynamic(t.stride(-1)) or t.stride(-1) != 1):
            return Reject(f"the columns of {which} are {t.stride(-1)} apart")
    if not same_sizes(logits.shape, other.shape):
        return Reject(f"logits has shape {tuple(logits.shape)} and {name} {tuple(other.shape)}")
    return (
        reject_weight(logits, weight)
        or reject_dtypes(logits=logits)
        or reject_dtypes(**{name: other})
    )


def reduced(losses: Tensor, logits: Tensor, reduction: str, elements: bool, dtype: torch.dtype):
    """The losses of the rows, their sum, or their mean over rows, or over all `elements`."""
    if reduction == "rows":
        return losses.view(logits.shape[:-1]).to(dtype)
    total = losses.sum()
    return (total / count(logits, elements) if reduction == "mean" else total).to(dtype)


def for_each_row(dloss: Tensor, logits: Tensor, reduction: str, elements: bool) -> Tensor:
    """What the loss of each row is multiplied with, from the gradient of what `reduced` gives."""
    dloss = dloss.float()
    return dloss / count(logits, elements) if reduction == "mean" else dloss.contiguous()


def count(logits: Tensor, elements: bool):
    return logits.numel() // (1 if elements else logits.shape[-1])


def finite_tops(x: Tensor) -> Tensor:
    """The largest number of each row of x `[rows, v]`, 0 for -infinity: what the backward reads."""
    top = x.amax(1)
    return torch.where(top == -math.inf, 0.0, top)


def forward_config(v: int, weighted: bool) -> tuple[int, int, int]:
    """Lanes, logits a lane and warps for the sums: 8 neighbours a thread, up to 4 times, or twice
    where weights take registers too.
    """
    warps = 1 if v <= 4096 else 4
    size = min(triton.next_power_of_2(v), (512 if weighted else 1024) * warps)
    lanes = min(size, 256 * warps)
    return lanes, size // lanes, warps


def forward(
    x: Tensor, target: Target, how: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each row, `[rows]`, and what the gradient reads, `[5, rows]`, in fp32:

    0, 1    the largest of the scaled logits, and log Σ e^(x - that)
    2, 3    of a teacher the same; or the sum of given probabilities, and 0
    4       of a teacher the mean over p of (y - its largest) - (x - its largest), without the y in
            a cross entropy; or 0

    x is `[..., v]` in fp32, bf16 or fp16, as target.y, their columns one element apart. how: as
    forward_config. Grid: rows.
    """
    v = number(x.shape[-1])
    lanes, each, warps = how or forward_config(v, target.weight is not None)
    x, y, (length, places) = in_rows(x, target.y)
    rows = x.numel() // max(v, 1)
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    kept = torch.empty(5, rows, dtype=torch.float32, device=x.device)
    launch(
        soft_targets_kernel, (rows,), x, y, target.weight, losses, kept, length, *steps(places),
        *target.numbers(), UNIT=places[0].unit, Y_UNIT=places[1].unit, V=v, LANES=lanes,
        LOGITS=each, **target.constants(), num_warps=warps,
    )  # fmt: skip
    return losses, kept


def backward(
    x: Tensor, target: Target, kept: Tensor, dloss: Tensor, needs: tuple[bool, bool],
    how: tuple[int, int, int] = (16384, 16, 1),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x and of target.y, in their dtypes, contiguous; None for what is not needed.

    dloss is what the loss of each row is multiplied with: one number, or as many as there are
    rows, contiguous. x, target and kept as in the forward. how: columns a step, warps and stages.
    Grid: rows.
    """
    v = number(x.shape[-1])
    grads = tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if needed else None
        for t, needed in zip((x, target.y), needs, strict=True)
    )
    x, y, (length, places) = in_rows(x, target.y)
    launch(
        soft_targets_backward_kernel, (x.numel() // max(v, 1),),
        x, y, target.weight, kept, dloss, *grads, length, *steps(places), *target.numbers(),
        EACH=dloss.dim() > 0, UNIT=places[0].unit, Y_UNIT=places[1].unit, V=v,
        **target.constants(), **config(v, *how),
    )  # fmt: skip
    return grads


def in_rows(x: Tensor, y: Tensor) -> tuple:
    """Both, copied where their rows are not regular, and where they lie, as rows_of."""
    found = rows_of(x, y)
    if found is None:
        x, y = x.contiguous(), y.contiguous()
    return x, y, found or rows_of(x, y)


def steps(places: list) -> tuple:
    return tuple(step for place in places for step in (place.outer, place.inner))


@triton.jit
def probabilities(y, col, W, V: tl.constexpr, smoothing, SMOOTH: tl.constexpr):
    """Given probabilities of these columns, smoothed and weighted."""
    if SMOOTH:
        smooth = tl.cast(smoothing, tl.float32)
        y = y * (1.0 - smooth) + smooth / V
    if W is not None:
        y *= tl.load(W + col, col < V, 0.0).to(tl.float32)
    return y


@triton.jit
def accumulate(
    x, y, keep, tops, sums, terms, y_tops, mass,
    TEACHER: tl.constexpr, DIVERGENCE: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Of each lane, with the rows of x and y `[LOGITS, LANES]`: the largest x, the sum of the
    e^(x - that), of p and of p (log p - x) with the x and the teacher's y less the largest, and the
    largest y. keep: which columns there are; None: all.
    """
    top = tl.maximum(tops, tl.max(x, 0))
    shift = finite(top)
    x -= shift[None, :]
    sums *= tl.exp2((tops - shift) * 1.4426950408889634)
    sums += tl.sum(tl.exp2(x * 1.4426950408889634), 0)
    moved = shift - finite(tops)
    if TEACHER:
        y_top = tl.maximum(y_tops, tl.max(y, 0))
        y_shift = finite(y_top)
        y -= y_shift[None, :]
        p = tl.exp2(y * 1.4426950408889634)
        fade = tl.exp2((y_tops - y_shift) * 1.4426950408889634)
        if DIVERGENCE:
            moved -= y_shift - finite(y_tops)
            y = tl.where(p == 0.0, 0.0, y) if ZEROS else y
            term = p * (y - x)
        else:
            term = -p * x
        y_tops = y_top
    else:
        p = y
        fade = 1.0
        if DIVERGENCE:
            term = p * (tl.where(p == 0.0, 0.0, tl.log(p)) - x)
        else:
            term = -p * x
    if keep is not None:  # beyond the last column 0 · infinity
        term = tl.where(keep, term, 0.0)
    terms = (terms + mass * moved) * fade + tl.sum(term, 0)
    return top, sums, terms, y_tops, mass * fade + tl.sum(p, 0)


# Bytes: logits and target once.
@triton.jit
def soft_targets_kernel(
    X, Y, W, LOSS, KEPT, length, outer, inner, y_outer, y_inner, scale, teacher_scale, smoothing,
    UNIT: tl.constexpr, Y_UNIT: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
    LOGITS: tl.constexpr, TEACHER: tl.constexpr, DIVERGENCE: tl.constexpr, ZEROS: tl.constexpr,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    X += first_of_row(row, length, outer, inner, UNIT)
    Y += first_of_row(row, length, y_outer, y_inner, Y_UNIT)
    scale, y_scale = tl.cast(scale, tl.float32), tl.cast(teacher_scale, tl.float32)
    col = tl.arange(0, LOGITS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tops = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    terms = tl.zeros([LANES], tl.float32)
    y_tops = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    WHOLE: tl.constexpr = V // (LOGITS * LANES) * (LOGITS * LANES)
    for start in tl.range(0, WHOLE, LOGITS * LANES):
        x = tl.load(X + start + col).to(tl.float32) * scale
        y = tl.load(Y + start + col).to(tl.float32)
        y = y * y_scale if TEACHER else probabilities(y, start + col, W, V, smoothing, SMOOTH)
        tops, sums, terms, y_tops, mass = accumulate(
            x, y, None, tops, sums, terms, y_tops, mass, TEACHER, DIVERGENCE, ZEROS
        )
    if WHOLE < V:
        keep = WHOLE + col < V
        x = tl.load(X + WHOLE + col, keep, 0.0).to(tl.float32) * scale
        x = tl.where(keep, x, float("-inf"))
        y = tl.load(Y + WHOLE + col, keep, 0.0).to(tl.float32)
        y = y * y_scale if TEACHER else probabilities(y, WHOLE + col, W, V, smoothing, SMOOTH)
        y = tl.where(keep, y, float("-inf") if TEACHER else 0.0)
        tops, sums, terms, y_tops, mass = accumulate(
            x, y, keep, tops, sums, terms, y_tops, mass, TEACHER, DIVERGENCE, ZEROS
        )
    top = finite(tl.max(tops))
    all_of_x = tl.sum(sums * tl.exp2((tops - top) * 1.4426950408889634))
    log = tl.log(all_of_x)
    moved = top - finite(tops)
    if TEACHER:
        first = finite(tl.max(y_tops))
        share = tl.exp2((y_tops - first) * 1.4426950408889634)
        if DIVERGENCE:
            moved -= first - finite(y_tops)
        terms += mass * moved
        all_of_y = tl.sum(mass * share)
        second = tl.log(all_of_y)
        # of nearly the same distributions the quotient is nearly 1, and nothing is lost
        log_of_sums = tl.log(all_of_x / all_of_y) if DIVERGENCE else log
        mean = tl.sum(terms * share) / all_of_y
        loss = mean + log_of_sums
    else:
        first = tl.sum(mass)
        second = 0.0
        mean = 0.0
        loss = tl.sum(terms + mass * moved) + first * log
    tl.store(LOSS + row, loss)
    tl.store(KEPT + row, top)
    tl.store(KEPT + rows + row, log)
    tl.store(KEPT + 2 * rows + row, first)
    tl.store(KEPT + 3 * rows + row, second)
    tl.store(KEPT + 4 * rows + row, mean)


# Bytes: logits and target once, each gradient once.
@triton.jit
def soft_targets_backward_kernel(
    X, Y, W, KEPT, DLOSS, DX, DY, length, outer, inner, y_outer, y_inner,
    scale, teacher_scale, smoothing,
    EACH: tl.constexpr, UNIT: tl.constexpr, Y_UNIT: tl.constexpr, V: tl.constexpr,
    TEACHER: tl.constexpr, DIVERGENCE: tl.constexpr, ZEROS: tl.constexpr, SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    X += first_of_row(row, length, outer, inner, UNIT)
    Y += first_of_row(row, length, y_outer, y_inner, Y_UNIT)
    scale, y_scale = tl.cast(scale, tl.float32), tl.cast(teacher_scale, tl.float32)
    d = tl.load(DLOSS + (row if EACH else 0)).to(tl.float32)
    top, log = tl.load(KEPT + row), tl.load(KEPT + rows + row)
    first, second = tl.load(KEPT + 2 * rows + row), tl.load(KEPT + 3 * rows + row)
    mean = tl.load(KEPT + 4 * rows + row)
    lane = tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        col = start + lane
        keep = col < V
        x = tl.load(X + col, keep, 0.0).to(tl.float32) * scale - top
        y = tl.load(Y + col, keep, 0.0).to(tl.float32)
        if TEACHER:
            y = y * y_scale - first
            p = tl.exp2((y - second) * 1.4426950408889634)
            mass = 1.0
        else:
            p = probabilities(y, col, W, V, smoothing, SMOOTH)
            mass = first
        if DX is not None:
            q = tl.exp2((x - log) * 1.4426950408889634)
            tl.store(DX + row * V + col, (mass * q - p) * (d * scale), keep)
        if DY is not None:
            if TEACHER:
                apart = (y - x if DIVERGENCE else -x) - mean
                dy = tl.where(p == 0.0, 0.0, p * apart) * (d * y_scale)
            else:
                dy = (tl.log(p) + 1.0 if DIVERGENCE else 0.0) - (x - log)
                dy *= d
                if SMOOTH:
                    dy *= 1.0 - tl.cast(smoothing, tl.float32)
                if W is not None:
                    dy *= tl.load(W + col, keep, 0.0).to(tl.float32)
            tl.store(DY + row * V + col, dy, keep)
