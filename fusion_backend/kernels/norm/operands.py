"""What the kernels of row normalisations read and fill.

Rows are `[..., n]` in fp32, bf16 or fp16, their columns one element apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.inputs import as_rows, maybe_rows, number
from fusion_backend.kernels.common.rows import Config, tuned


class Norm(NamedTuple):
    """What is computed: weight and bias `[n]` or None, a number added to the weight, layer
    (centred) or RMS, dropout of x.
    """

    weight: Tensor | None
    bias: Tensor | None
    offset: float | None
    eps: float
    centred: bool
    dropout: Dropout | None = None

    def dtype_of_vectors(self, h: Tensor) -> torch.dtype:
        """Of weight and bias; without them that of h."""
        return next((t.dtype for t in (self.weight, self.bias) if t is not None), h.dtype)


class Forward(NamedTuple):
    """The arguments of a forward kernel, in the kernels' order. Filled are y, and h, mean and rstd
    where they are not None, as none is that nobody reads: h is x through its dropout plus the
    residual, mean and rstd `[rows]` are in fp32.
    """

    x: Tensor
    seed: Tensor | None
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    h: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    rows: int
    offset: float
    eps: float


class Backward(NamedTuple):
    """What a backward reads and fills.

    dy: the gradient of the result. dh: the gradient that h itself gets, or None. h: what was
    normalised. mean, rstd: `[rows]` in fp32; mean is None where the norm is not centred. needs:
    whether the gradients of h, weight and bias are wanted. out: filled with the gradient of h,
    contiguous, or None. dx: filled with the gradient of the operand of the sum that was dropped
    out, or that has another dtype than h, contiguous, or None; with it, out is not None.
    """

    dy: Tensor
    dh: Tensor | None
    h: Tensor
    mean: Tensor | None
    rstd: Tensor
    norm: Norm
    needs: tuple[bool, bool, bool]
    out: Tensor | None
    dx: Tensor | None

    @property
    def n(self) -> int:
        return number(self.h.shape[-1])

    def by_rows(self) -> tuple[tuple, object, dict]:
        """dy, dh and h as kernels walk through them, the number of rows, and the distances of rows
        in memory.
        """
        (dy, _, dy_stride), (h, rows, h_stride) = as_rows(self.dy), as_rows(self.h)
        dh, _, dh_stride = maybe_rows(self.dh)
        strides = dict(DY_STRIDE=dy_stride, DH_STRIDE=dh_stride, H_STRIDE=h_stride)
        return (dy, dh, h), rows, strides

    def config(self, suffix: str, rule: Config) -> Config:
        """From the table, for the two norms that have been swept; else the rule."""
        if not self.norm.centred or (self.dh is not None and self.norm.dropout is None):
            return rule
        kernel = "layer_norm" if self.norm.dropout is None else "dropout_add_layer_norm"
        rows = self.h.numel() // self.n
        return tuned(f"{kernel} backward{suffix}", rows, self.n, self.h.element_size(), rule)
