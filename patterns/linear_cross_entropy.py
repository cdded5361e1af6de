"""The last linear layer and its loss: cross entropy of x W + b, in most cases without the logits in
memory.

x is `[..., k]`, W `[k, v]` with any strides, b `[v]` may be missing, target int64 with as many
elements as x has rows. The loss has the dtype of the logits, or is float32, as under autocast and
where the logits are upcast.

A quarter of the rows at a time: their logits, by the library's matrix product; the loss of each
row; and, where somebody will differentiate, the gradient of the logits in their place, and the
products that make of it the gradients of x, W and b. That of W is rounded to its dtype after every
quarter: in bf16 its error is up to 1.4 times that of one product. The loss is differentiated before
its own gradient is known, which scales the results in the backward: one rounding more, none for
powers of two. Where each row's loss has a gradient of its own (reduction "none"), or small numbers
would be lost (fp16 needs the scale of the loss), the backward starts from the logits instead, which
a compiled graph then keeps.

In training in 16 bits with more than 128 rows and without smoothing, where v is no multiple of 8,
the logits are kept as well. Rows of such a v begin where the library's fast products cannot read:
Inductor copies the gradient of the logits into padded rows, or the library takes a slower product.
Here the logits are padded from the start, and so is their gradient. The gradient of W is rounded
once.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import LessAccurate, Op, Pattern, Reject, Replacement
from fusion_backend.kernels import dynamic, number, reject_dtypes, reject_dynamic, reject_vectors
from fusion_backend.kernels.common.inputs import in_layout
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.gemm.products import add_product
from fusion_backend.kernels.loss.cross_entropy import (
    forward,
    gradient_in_place,
    reject_target,
    valid,
)
from fusion_backend.kernels.loss.padded_logits import (
    gradient_of_logits,
    padded_logits,
    padded_weight,
    uneven,
)

# a quarter of the logits in memory at a time; each chunk more is one rounding of the gradient of W
# more
CHUNKS = 4
TILE = 128  # rows of a tile of the library's products


@Pattern
def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: Literal["mean", "sum", "none"],
    loss: Literal["same", "float32"],
) -> Tensor:
    logits = x @ w if b is None else x @ w + b
    logits = logits.float() if loss == "float32" else logits
    logits = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction
    )


@linear_cross_entropy.near_miss
def _(x, w, b, target, ignore_index, smoothing, reduction, loss):
    """of probabilities"""
    return F.nll_loss((x @ w).softmax(-1), target, ignore_index=ignore_index, reduction=reduction)


@linear_cross_entropy.replacement
def _(x, w, b, target, ignore_index, smoothing, reduction, loss, training):
    if training and padded(x, w, target, smoothing):
        given = (x, w, b, target, ignore_index, reduction, loss)
        why = "the logits and their gradient lie in padded rows"
        return Replacement(padded_linear_cross_entropy, given, {}, why)
    given = (x, w, b, target, ignore_index, smoothing, reduction, loss)
    return Replacement(linear_cross_entropy, given)


def padded(x: Tensor, w: Tensor, target: Tensor, smoothing: float) -> bool:
    """Would the gradient of w be rounded more than once, and products with the logits be slow?"""
    if x.itemsize != 2 or in_one_chunk(target) or dynamic(smoothing) or smoothing:
        return False
    return w.dim() == 2 and not dynamic(w.shape[1]) and uneven(w.dtype, number(w.shape[1]))


def in_one_chunk(target: Tensor) -> bool:
    return statically_known_true(target.numel() <= TILE)


@linear_cross_entropy.guard
def _(x, w, b, target, ignore_index, smoothing, reduction, loss):
    if refused := reject_arguments(x, w, b, target, ignore_index):
        return refused
    if dynamic(x.numel() // number(x.shape[-1])):
        return Reject(
            "the number of rows is dynamic: the chunks are cut when the graph is compiled"
        )
    return reject_dynamic(smoothing=smoothing)


def reject_arguments(x, w, b, target, ignore_index) -> Reject | None:
    """Refuse what no kernel takes."""
    if w.dim() != 2:
        return Reject(f"w has {w.dim()} dimensions")
    for name, size in (("columns", x.shape[-1]), ("classes", w.shape[1])):
        if dynamic(size):
            return Reject(f"the number of {name} is dynamic")
        if not number(size):
            return Reject(f"the number of {name} is 0")
    if b is not None and b.shape != w.shape[1:]:
        return Reject(f"b has shape {tuple(b.shape)}")
    return (
        reject_vectors(w.shape[1], b=b)
        or reject_target(target)
        or reject_dtypes(x=x, w=w, b=b)
        or reject_dynamic(ignore_index=ignore_index)
    )


@linear_cross_entropy.worthwhile
def _(x, w, b, target, ignore_index, smoothing, reduction, loss, training):
    if training and x.dtype != torch.float32 and not in_one_chunk(target):
        return LessAccurate(
            "the gradient of w is rounded once a chunk; fusion.gate=always takes it, and saves "
            "the logits"
        )
    if statically_known_true(target.numel() * w.shape[1] < 1 << 29) or x.dtype != torch.bfloat16:
        return UNMEASURED


@linear_cross_entropy.kernel(saves=("dx", "dw", "db"))
def _(x, w, b, target, ignore_index, smoothing, reduction, loss, save):
    counts = valid(target, ignore_index, w.shape[1])
    found = (None, None, None)
    if save and not later(x.dtype, reduction):
        scale = 1 / counts.sum() if reduction == "mean" else torch.ones((), device=x.device)
        losses, *found = gradients(x, w, b, target, scale, ignore_index, smoothing, wanted(x, w, b))
    else:
        parts = zip(in_chunks(x), in_chunks(target), strict=True)
        losses = torch.cat(
            [forward(logits_of(part, w, b), t, ignore_index, smoothing)[0] for part, t in parts]
        )
    losses = reduced(losses, counts, reduction)
    found = (x.new_empty(0) if d is None else d for d in found)
    return losses.to(torch.float32 if loss == "float32" else x.dtype), *found


@linear_cross_entropy.backward
def _(saved, dloss):
    dloss = dloss.float().contiguous()
    needs = [saved.needs[name] and getattr(saved, name) is not None for name in ("x", "w", "b")]
    kept = [d if d.numel() else None for d in (saved.dx, saved.dw, saved.db)]
    if all(d is not None for d, need in zip(kept, needs, strict=True) if need):
        dx, dw, db = (
            (d.float() * dloss).to(d.dtype) if need else None
            for d, need in zip(kept, needs, strict=True)
        )
    else:
        scale = (
            dloss / (saved.target != saved.ignore_index).sum()
            if saved.reduction == "mean"
            else dloss
        )
        numbers = saved.ignore_index, saved.smoothing
        _, dx, dw, db = gradients(saved.x, saved.w, saved.b, saved.target, scale, *numbers, needs)
    return dx, dw.t() if needs[1] and by_columns(saved.w) else dw, db, None


def reduced(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def later(dtype, reduction) -> bool:
    """Must the gradients wait for that of the loss?"""
    return reduction == "none" or dtype == torch.float16


def wanted(*tensors: Tensor | None) -> list[bool]:
    """Whose gradient autograd will ask for. Nobody's: it is not autograd that asks, and all are
    wanted.
    """
    needs = [t is not None and t.requires_grad for t in tensors]
    return needs if any(needs) else [t is not None for t in tensors]


def by_columns(w: Tensor) -> bool:
    """The weight of a linear layer, transposed: its gradient lies in memory like that, too."""
    return w.stride(0) == 1


def in_chunks(t: Tensor) -> tuple[Tensor, ...]:
    """`[..., k]` or `[rows]`: a quarter of the rows each, in multiples of a tile's 128, so there
    may be fewer.
    """
    rows = t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t
    quarter = -(-number(rows.shape[0]) // CHUNKS)
    return rows.split(-(-quarter // TILE) * TILE)


def logits_of(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else torch.addmm(b, x, w)


def gradients(x, w, b, target, scale, ignore_index, smoothing, needs):
    """The loss of each row, where it has the gradient `scale` (one number, or one a row), and those
    of x, w and b.

    That of w as it lies in memory, transposed where w is: Inductor scales it in place only in the
    order of its memory.
    """
    scales = in_chunks(scale) if scale.dim() else itertools.repeat(scale)
    losses, dx, dw, db = [], [], None, None
    for part, t, one in zip(in_chunks(x), in_chunks(target), scales, strict=False):
        d = logits_of(part, w, b)
        losses.append(gradient_in_place(d, t, one, ignore_index, smoothing))
        if needs[0]:
            dx.append(d @ w.t())
        if needs[1]:
            factors = (d.t(), part) if by_columns(w) else (part.t(), d)
            if dw is None:
                dw = factors[0] @ factors[1]
            else:
                add_product(dw, *factors, losses[-1])
        if needs[2]:
            db = d.sum(0, dtype=torch.float32) if db is None else db + d.sum(0, dtype=torch.float32)
    dx = torch.cat(dx).reshape(x.shape) if needs[0] else None
    return torch.cat(losses), dx, dw, db.to(b.dtype) if needs[2] else None


@Op
def padded_linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: Literal["mean", "sum", "none"],
    loss: Literal["same", "float32"],
) -> Tensor:
    """The same without smoothing, with the logits kept in padded rows."""
    return linear_cross_entropy.reference(x, w, b, target, ignore_index, 0.0, reduction, loss)


@padded_linear_cross_entropy.guard
def _(x, w, b, target, ignore_index, reduction, loss):
    return reject_arguments(x, w, b, target, ignore_index)


@padded_linear_cross_entropy.worthwhile
def _(x, w, b, target, ignore_index, reduction, loss, training):
    # timed with 16,384 rows of 30,522 and of 50,257 classes
    if statically_known_true(target.numel() * w.shape[1] < 500_000_000):
        return UNMEASURED
    if x.dtype != torch.bfloat16 or number(w.shape[0]) != 1024:
        return UNMEASURED


@padded_linear_cross_entropy.kernel(saves=("logits", "rows"))
def _(x, w, b, target, ignore_index, reduction, loss, save):
    counts = valid(target, ignore_index, number(w.shape[1]))  # the padding is no class
    logits = padded_logits(x.reshape(-1, x.shape[-1]), w, b)
    losses, rows = forward(logits, target, ignore_index, 0.0)
    losses = reduced(losses, counts, reduction)
    losses = losses.to(torch.float32 if loss == "float32" else x.dtype)
    return losses, logits if save else x.new_empty(0), rows


@padded_linear_cross_entropy.backward(plain=True)
def _(saved, dloss):
    x, w, v = saved.x, saved.w, number(saved.w.shape[1])
    scale = dloss.float()
    if saved.reduction == "mean":  # where no row counts, the gradient is 0
        scale = scale / (saved.target != saved.ignore_index).sum().clamp(min=1)
    d = gradient_of_logits(saved.logits, saved.rows, saved.target, scale)
    dx = (d @ padded_weight(w)).view(x.shape) if saved.needs["x"] else None
    dw = db = None
    if saved.needs["w"]:
        dw = in_layout(w, (d.t() @ x.reshape(-1, x.shape[-1]))[:v].t())
    if saved.needs["b"]:
        db = d.sum(0, dtype=torch.float32)[:v].to(saved.b.dtype)
    return dx, dw, db, None


@padded_linear_cross_entropy.inputs(dict(rows=5, k=8, v=21), dict(rows=16384, k=1024, v=30522))
def _(tensor, rows, k, v):
    w = tensor(k, v) * k**-0.5  # logits of order one
    return tensor(rows, k), w, tensor(v), (tensor(rows) > 0).long(), -100, "mean", "same"


@linear_cross_entropy.inputs(dict(rows=5, k=8, v=20), dict(rows=8192, k=4096, v=128256))
def _(tensor, rows, k, v):
    w = tensor(k, v) * k**-0.5  # logits of order one
    return tensor(rows, k), w, tensor(v), (tensor(rows) > 0).long(), -100, 0.1, "mean", "same"
