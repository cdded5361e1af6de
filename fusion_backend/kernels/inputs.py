"""What guards and launchers ask about their inputs, which may be fake tensors with symbolic sizes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq

from fusion_backend.pattern import Reject

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dynamic(value) -> bool:
    """Is this size or scalar symbolic, so that a kernel cannot be compiled for its value?"""
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def reject_dtypes(**tensors: Tensor | None) -> Reject | None:
    """Refuse dtypes the kernels do not compute in, and inputs whose dtypes differ."""
    named = {name: t.dtype for name, t in tensors.items() if isinstance(t, Tensor)}
    first, want = next(iter(named.items()))
    if want not in DTYPES:
        return Reject(f"{first} is {want}; the kernel takes {', '.join(DTYPES.values())}")
    for name, dtype in named.items():
        if dtype != want:
            return Reject(f"{first} is {want} and {name} is {dtype}")


def reject_dynamic(**scalars) -> Reject | None:
    """Refuse symbolic scalars: Inductor would hand them to a kernel as integers."""
    for name, value in scalars.items():
        if dynamic(value):
            return Reject(f"{name} is dynamic; mark it as constant or pass a tensor")


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Are shapes and strides known to be equal? Adds no guard."""
    return a.dim() == b.dim() and guard_or_false(sym_eq((*a.shape, *a.stride()), (*b.shape, *b.stride())))


def memory(t: Tensor) -> str:
    return f"shape {tuple(t.shape)}, strides {t.stride()}"


def reject_layouts(**tensors: Tensor | float) -> Reject | None:
    """Refuse tensors that an elementwise kernel cannot walk through in the order of their memory."""
    named = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    first, x = next(iter(named.items()))
    if not same_layout(x, torch.empty_like(x)):
        return Reject(f"{first} is not dense: {memory(x)}")
    for name, t in named.items():
        if not same_layout(x, t):
            return Reject(f"{first} and {name} differ in memory: {memory(x)} and {memory(t)}")


def in_layout(out: Tensor, t: Tensor) -> Tensor:
    """The tensor with the shape and strides of `out`: itself, or a copy."""
    return t if same_layout(t, out) else torch.empty_like(out, dtype=t.dtype).copy_(t)


def as_rows(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]`: a view where possible, else a copy.

    Columns are one element apart. Rows may be padded, but their distance is a number, so that a kernel can be compiled
    for it: only then does Triton know how wide its loads may be.
    """
    x = x.reshape(-1, x.shape[-1])
    known = not dynamic(x.stride(0)) and not dynamic(x.stride(1)) and x.stride(1) == 1
    return x if known else x.contiguous()
