"""What the operands of a product must be like, so that the tensor memory accelerator can read them
as tiles: rows of adjacent elements whose first ones are multiples of 16 bytes apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import as_rows, dynamic, number, reject_dtypes
from fusion_backend.reporting.reject import Reject

ALIGNED = 16  # bytes


def reject_product(x: Tensor, **weights: Tensor) -> Reject | None:
    """Refuse products that the kernels cannot compute: x is `[..., k]`, the weights `[k, n]`."""
    if x.dim() < 2:
        return Reject(f"x has {x.dim()} dimensions; at least 2 are needed")
    first = next(iter(weights.values()))
    for name, w in weights.items():
        if w.dim() != 2:
            return Reject(f"{name} has {w.dim()} dimensions; it must have 2")
        if any(dynamic(size) for size in (*w.shape, *w.stride())):
            return Reject(f"{name} has a dynamic shape")
        if tuple(w.shape) != tuple(first.shape):
            return Reject(f"the weights have shapes {tuple(first.shape)} and {tuple(w.shape)}")
        if by_output(w) is None:
            return Reject(
                f"neither the rows nor the columns of {name}, with strides {w.stride()}, are dense"
            )
    k, n = first.shape
    if not (k and n):
        return Reject(f"a weight of {k} x {n} has no elements")
    return reject_alignment(x, n, **weights)


def reject_alignment(x: Tensor, n: int, **weights: Tensor) -> Reject | None:
    """Refuse rows that do not begin at multiples of 16 bytes, copied or not."""
    distances = dict(x=aligned_rows(x)[2])
    distances |= {name: distance_of(w) for name, w in weights.items()}
    for name, apart in (distances | dict(result=n)).items():
        if not statically_known_true(apart * x.element_size() % ALIGNED == 0):
            return Reject(
                f"the rows of {name}, {apart} elements apart, are not aligned to 16 bytes"
            )
    for name, w in weights.items():
        if not begins_aligned(w):
            return Reject(f"{name} begins in the middle of 16 bytes of its memory")
    return None


def aligned_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """As `as_rows`, but a copy also where rows overlap, as those of an expanded tensor do, or do
    not begin at multiples of 16 bytes.
    """
    rows, count, distance = as_rows(x)
    length = number(x.shape[-1])
    apart = statically_known_true(distance >= length)
    aligned = statically_known_true(distance * x.element_size() % ALIGNED == 0)
    if apart and aligned and begins_aligned(rows):
        return rows, count, distance
    return x.clone(memory_format=torch.contiguous_format), count, length


def begins_aligned(t: Tensor) -> bool:
    """Is its first element known to be at a multiple of 16 bytes? PyTorch allocates at those."""
    return statically_known_true(t.storage_offset() * t.element_size() % ALIGNED == 0)


def by_output(w: Tensor) -> bool | None:
    """Does a weight `[k, n]` lie in memory as that of a linear layer does, a row for each output?
    None: neither so nor by inputs.
    """
    down, across = w.stride()
    if down == 1 and across >= w.shape[0]:
        return True
    return False if across == 1 and down >= w.shape[1] else None


def distance_of(w: Tensor) -> int:
    """How many elements the rows of a weight, as it lies in memory, are apart."""
    return w.stride(1) if by_output(w) else w.stride(0)


def reject_bias(n: int, **biases: Tensor | None) -> Reject | None:
    """Refuse biases that are no dense vectors of n elements; None passes."""
    for name, bias in biases.items():
        if bias is not None and not (tuple(bias.shape) == (n,) and number(bias.stride(0)) == 1):
            return Reject(
                f"{name} with shape {tuple(bias.shape)} and strides {bias.stride()} is no plain "
                f"vector of {n}"
            )
    return None


def reject_layers(
    x: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor | None],
    last: dict[str, Tensor], last_bias: dict[str, Tensor | None],
) -> Reject | None:  # fmt: skip
    """Refuse two layers in sequence that the kernels do not take: `weights` multiply x, and `last`
    multiplies the hidden layer. Only 16-bit dtypes pass.
    """
    if x.element_size() != 2:
        return Reject(f"x is {x.dtype}; the kernels take bf16 and fp16")
    refused = (
        reject_dtypes(x=x, **weights, **biases, **last, **last_bias)
        or reject_product(x, **weights)
        or reject_bias(next(iter(weights.values())).shape[1], **biases)
    )
    if refused:
        return refused
    (w,) = last.values()
    hidden = x.new_empty((1, w.shape[0]), device="meta")
    return reject_product(hidden, **last) or reject_bias(w.shape[1], **last_bias)


def reject_precision(x: Tensor) -> Reject | None:
    """Refuse fp32 that must not be multiplied as TF32."""
    if x.dtype == torch.float32 and precision() == "ieee":
        return Reject(
            "fp32 without TF32 has no tensor cores: set torch.set_float32_matmul_precision('high')"
        )
    return None


def precision() -> str:
    """Of products of fp32, as torch.set_float32_matmul_precision says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
