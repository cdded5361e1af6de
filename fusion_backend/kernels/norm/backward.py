"""Backward of the row normalisations in forward.py: gradients of the rows, the weight and the bias.

With g = dy · (weight + offset) and u = c · rstd, dh = rstd (g - u mean(g u) - mean(g)) + what h
itself gets, without mean(g) where the norm is not centred; dx = dh through the dropout. dweight and
dbias are the sums over rows of dy · u and dy: partial sums of each program, added up by a second
kernel, in order: the same bits every time (weight_sums.py). Sums in fp32.

Who computes it: of rows that a program holds, a few programs a multiprocessor that walk through
them (backward_short.py); of few rows, where a second kernel would cost as much as the first, some
programs have a row and others columns (backward_few.py); rows that no program holds are shared by
programs (backward_cooperative.py), or read twice, by two kernels (backward_long.py).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.inputs import dynamic, number
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm.backward_cooperative import backward_cooperative, config_for
from fusion_backend.kernels.norm.backward_few import backward_few
from fusion_backend.kernels.norm.backward_long import backward_long
from fusion_backend.kernels.norm.backward_short import backward_short
from fusion_backend.kernels.norm.operands import Backward, Norm
from fusion_backend.kernels.norm.weight_sums import add_up

# elements of a row whose h, dy, weight and two partial sums stay in registers
MAX_HELD_BACKWARD = 8192
# up to which dy and h are read twice, the second time from L2, by one kernel
FEW_ROWS, FEW_ELEMENTS = 256, 1 << 21


def backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, mean: Tensor, rstd: Tensor, norm: Norm,
    needs: tuple[bool, bool, bool], dx: Tensor | None = None, config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of h `[..., n]`, contiguous, and of weight and bias `[n]`, each in its dtype; None
    where `needs` says no.

    dh is what h itself gets. dx, where it is given, is filled with the gradient of what was dropped
    out, or with that of h in another dtype; h must be wanted then. See operands.Backward for shapes
    and dtypes.
    """
    n = number(h.shape[-1])
    needs = (needs[0], needs[1] and norm.weight is not None, needs[2] and norm.bias is not None)
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device) if needs[0] else None
    operands = Backward(dy, dh, h, mean if norm.centred else None, rstd, norm, needs, out, dx)
    if config is None and few(h):
        return out, *backward_few(operands)
    run = backward_short if n <= MAX_HELD_BACKWARD else backward_long
    if config is None and needs[0] and sharing_is_faster(n, norm) and shareable(h, config_for(n)):
        run = backward_cooperative
    sums = run(operands, config)
    return out, *add_up(sums, norm.dtype_of_vectors(h), *needs[1:])


def backward_of_sum(
    saved, dy: Tensor, dh: Tensor | None, mean: Tensor | None, norm: Norm
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, the residual, weight and bias of a norm of x + residual, x through its
    dropout if it has one. That of the residual is None where it is that of x.

    saved: what the backward of a pattern gets. One of x and residual has the dtype of the sum.
    """
    x, residual, h, needs = saved.x, saved.residual, saved.result[1], saved.needs
    narrow = x if x.dtype != h.dtype or norm.dropout is not None else residual
    apart = norm.dropout is not None or narrow.dtype != h.dtype
    wanted = apart and needs["x" if narrow is x else "residual"]
    second = torch.empty(h.shape, dtype=narrow.dtype, device=h.device) if wanted else None
    needed = needs["x"] or needs["residual"], needs["weight"], needs.get("bias", False)
    d, dweight, dbias = backward(dy, dh, h, mean, saved.rstd, norm, needed, second)
    dx, dresidual = (second, d) if apart and narrow is x else (d, second)
    return dx, dresidual, dweight, dbias


def sharing_is_faster(n: int, norm: Norm) -> bool:
    """Rows that do not fit, or would have random numbers made for a third more columns than there
    are.
    """
    return n > MAX_HELD_BACKWARD or (
        norm.dropout is not None and 2048 < n <= triton.next_power_of_2(n) * 3 // 4
    )


def few(h: Tensor) -> bool:
    """Are the rows short and few enough for one kernel?"""
    n = number(h.shape[-1])
    rows = h.numel() // n
    return (
        n <= MAX_HELD_BACKWARD
        and not dynamic(rows)
        and 0 < rows <= FEW_ROWS
        and rows * n <= FEW_ELEMENTS
    )
