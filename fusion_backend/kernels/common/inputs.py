"""What guards and launchers ask about their inputs, which may be fake tensors with
symbolic sizes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from fusion_backend.reporting.reject import Reject

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def number(value: Any) -> Any:
    """A size that is symbolic but can only be one number, as that number; any other as it is.

    A weight's shape has fixed it, say.
    """
    known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    return value if known is None else known


def dynamic(value: Any) -> bool:
    """Is this size or scalar symbolic, so that a kernel cannot be compiled for its value?"""
    return isinstance(number(value), (torch.SymInt, torch.SymFloat))


def reject_dtypes(**tensors: Tensor | None) -> Reject | None:
    """Refuse other dtypes than fp32, bf16 and fp16, and tensors whose dtypes differ."""
    named = {name: t.dtype for name, t in tensors.items() if isinstance(t, Tensor)}
    leader, want = next(iter(named.items()))
    if want not in DTYPES:
        return Reject(f"{leader} is {want}; the kernel takes {', '.join(DTYPES.values())}")
    for name, dtype in named.items():
        if dtype != want:
            return Reject(f"{leader} is {want} and {name} is {dtype}")


def common_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What torch promotes tensors of at least one dimension to; None passes."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return functools.reduce(torch.promote_types, dtypes)


def reject_dtypes_of_vectors(x: Tensor, **vectors: Tensor | None) -> Reject | None:
    """Refuse other dtypes than fp32, bf16 and fp16, and vectors of another dtype than x, unless all
    of them are in fp32, as under autocast.
    """
    given = {name: t for name, t in vectors.items() if t is not None}
    if any(t.dtype == torch.float32 for t in given.values()):
        return reject_dtypes(x=x) or reject_dtypes(**given)
    return reject_dtypes(x=x, **given)


def reject_dtypes_of_sum(x: Tensor, residual: Tensor, **others: Tensor | None) -> Reject | None:
    """Refuse other dtypes than fp32, bf16 and fp16, x and residual if neither has the dtype of
    their sum, and others of another dtype than the sum. Under autocast one of the two is in fp32.
    """
    if (no := reject_dtypes(x=x) or reject_dtypes(residual=residual)) is not None:
        return no
    wide = common_dtype(x, residual)
    if wide not in (x.dtype, residual.dtype):
        return Reject(f"x is {x.dtype} and residual is {residual.dtype}")
    widest = dict(x=x) if x.dtype == wide else dict(residual=residual)
    return reject_dtypes(**widest, **others)


def reject_dynamic(**scalars: Any) -> Reject | None:
    """Refuse symbolic scalars: Inductor would hand them to a kernel as integers."""
    for name, value in scalars.items():
        if dynamic(value):
            return Reject(f"{name} is dynamic: a number that changes from call to call")


def same_sizes(a, b) -> bool:
    """Are two lists of sizes known to be equal? Adds no guard."""
    return len(a) == len(b) and statically_known_true(sym_eq(tuple(a), tuple(b)))


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Are shapes and strides known to be equal? Adds no guard."""
    return same_sizes((*a.shape, *a.stride()), (*b.shape, *b.stride()))


def memory(t: Tensor) -> str:
    return f"shape {tuple(t.shape)}, strides {t.stride()}"


def reject_layouts(**tensors: Tensor | float) -> Reject | None:
    """Refuse tensors that an elementwise kernel cannot walk through in the order of their memory:
    those that are not dense, or differ in shape or strides. Numbers pass.
    """
    named = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    first, x = next(iter(named.items()))
    if not same_layout(x, torch.empty_like(x, device="meta")):
        return Reject(f"{first} is not dense: {memory(x)}")
    for name, t in named.items():
        if not same_layout(x, t):
            return Reject(f"{first} and {name} differ in memory: {memory(x)} and {memory(t)}")


def dense(x: Tensor, order) -> bool:
    """Is x known to be dense in memory, with its dimensions in this order? Adds no guard."""
    step = 1
    for d in reversed(order):
        if not statically_known_true(x.shape[d] == 1) and not statically_known_true(
            x.stride(d) == step
        ):
            return False
        step = step * x.shape[d]
    return True


def in_layout(out: Tensor, t: Tensor) -> Tensor:
    """t with the shape and strides of `out`: itself, or a copy."""
    return t if same_layout(t, out) else torch.empty_like(out, dtype=t.dtype).copy_(t)


def as_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """A tensor `[..., n]` seen as rows of n: the tensor, the number of rows and their distance in
    memory.

    Columns are one element apart. Rows may be padded, but their distance is a number, so that a
    kernel can be compiled for it: only then does Triton know how wide its loads may be. The tensor
    itself is returned where it can be walked through like that, not a view: Inductor would compute
    a value anew for each view of it. Else a copy.
    """
    *shape, n = map(number, x.shape)
    *strides, column = map(number, x.stride())
    rows = math.prod(shape)
    distance = strides[-1] if strides else n
    even = all(
        statically_known_true(strides[i] == strides[i + 1] * shape[i + 1])
        for i in range(len(shape) - 1)
    )
    if even and not dynamic(distance) and not dynamic(column) and (column == 1 or n == 1):
        return x, rows, distance
    return x.contiguous(), rows, n


def rows_as_in(out: Tensor, x: Tensor) -> tuple[Tensor, int, int]:
    """As `as_rows`, with the rows in the order in which those of `out`, dense and of the same
    shape, lie in memory.
    """
    if dense(out, range(out.dim())):
        return as_rows(x)
    n = number(x.shape[-1])
    return in_layout(out, x), math.prod(x.shape[:-1]), n


def maybe_rows(x: Tensor | None) -> tuple:
    """`as_rows` of a tensor that may be missing; of None it is (None, 0, 0)."""
    return (None, 0, 0) if x is None else as_rows(x)
