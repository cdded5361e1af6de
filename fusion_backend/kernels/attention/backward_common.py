"""What the kernels of the backward of attention share: their operands, the sums of rows where no
kernel of dq writes them, and the probabilities and score gradients of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.configs import row_strides
from fusion_backend.kernels.attention.documents import with_documents
from fusion_backend.kernels.attention.masking import MaskArguments
from fusion_backend.kernels.attention.ranges import program_block
from fusion_backend.kernels.attention.tiles import capped, exponential, masked, row_pointer
from fusion_backend.kernels.common.launch import launch


class Operands(NamedTuple):
    """What the kernels of the backward read, and the sums, which one of them writes."""

    q: Tensor  # [b, h, n, d]
    k: Tensor  # [b, h / group, m, d]
    v: Tensor  # [b, h / group, m, e]
    do: Tensor  # [b, h, n, e]
    lse: Tensor  # as the forward saves it
    # [b, h, n], rowsum(do · out) in fp32, which the kernel of dq or fill_sums writes; None: nobody
    # reads them
    sums: Tensor | None
    out: Tensor  # [b, h, n, e]
    masks: MaskArguments
    constants: dict

    @property
    def tensors(self) -> tuple:
        return self[:6]

    def with_documents(self, block: int, other: int) -> Operands:
        """For a kernel whose programs have `block` queries or keys, and walk through the others."""
        keys_are = self.constants["KEYS_ARE"]
        masks = with_documents(self.masks, self.q.shape[0], keys_are, block, other)
        return self._replace(masks=masks)

    @property
    def numbers(self) -> tuple:
        """The masks, and the strides of q, k, v and do."""
        read = self.q, self.k, self.v, self.do
        return (*self.masks.flat(), *(stride for t in read for stride in row_strides(t)))


def empty_like_in_memory(t: Tensor) -> Tensor:
    """An empty tensor `[b, h, n, d]` like t: heads last in memory where t has them so."""
    b, h, n, d = t.shape
    if statically_known_true(t.stride(1) < t.stride(2)):
        return torch.empty((b, n, h, d), dtype=t.dtype, device=t.device).transpose(1, 2)
    return torch.empty((b, h, n, d), dtype=t.dtype, device=t.device)


def fill_sums(operands: Operands) -> None:
    """Writes the sums where the kernel of dq does not run. Grid: blocks of 64 rows of all heads and
    batches.
    """
    out, do, sums, constants = operands.out, operands.do, operands.sums, operands.constants
    b, h, n, _ = out.shape
    launch(
        flash_row_sums_kernel, ((n + 63) // 64 * b * h,), out, do, sums, n, h,
        *row_strides(out), *row_strides(do),
        E=constants["E"], BE=constants["BE"], BM=64, num_warps=4,
    )  # fmt: skip


# Bytes: out and do once.
@triton.jit
def flash_row_sums_kernel(
    OUT, DO, SUMS, n, heads, out_batch, out_head, out_row, do_batch, do_head, do_row,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i0, head, batch = program_block(n, heads, BM)
    row, e = tl.arange(0, BM)[:, None], tl.arange(0, BE)[None, :]
    keep = (row < n - i0) & (e < E)
    OUT = row_pointer(OUT, (out_batch, out_head, out_row), batch, head, i0)
    out = tl.load(OUT + row * out_row + e, keep, 0.0).to(tl.float32)
    DO = row_pointer(DO, (do_batch, do_head, do_row), batch, head, i0)
    do = tl.load(DO + row * do_row + e, keep, 0.0).to(tl.float32)
    at = SUMS + (batch * heads + head) * n + i0 + tl.arange(0, BM)
    tl.store(at, tl.sum(out * do, 1), tl.arange(0, BM) < n - i0)


@triton.jit
def saved_of_rows(LSE, before, at, n, BIAS):
    """What the forward saved of rows of a head, with `before` rows of other heads in front: the
    logarithm of the sum, or with a bias the largest score, and one over the sum.
    """
    if BIAS is None:
        lse = tl.load(LSE + before + at)
        inverse = lse
    else:
        lse = tl.load(LSE + 2 * before + at)
        inverse = 1.0 / tl.load(LSE + 2 * before + n + at)
    return lse, inverse


@triton.jit
def probabilities(
    s, lse, inverse, masks, row, col, i0, j0,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, KEYS_ARE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Of the products of the tile at i0, j0; and which have a gradient."""
    bias, keep, keys, band, seed, at = masks
    BIAS, m = bias[0], at[4]
    s, visible = masked(s, masks, row, col, i0, j0, SCALE, CAP, FILL, KEYS_ARE, MASKED)
    p = exponential(s - lse, BIAS)
    if BIAS is not None:
        p *= inverse
    elif FILL is not None:
        # far down, the logarithm of a row that sees nothing has lost its sum, which is m
        if FILL < -30000.0:
            p = tl.where((lse < FILL * 0.5) & (col < m - j0), 1.0 / m, p)
    return p, visible


@triton.jit
def score_gradient(
    s, p, dp, sums, visible, SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr
):
    """ds of the scores with their bias, and of the products but for the scale."""
    ds = p * (dp - sums)
    if FILL is not None:
        ds = tl.where(visible, ds, 0.0)
    if CAP is not None:
        t = capped(s, SCALE, CAP)
        return ds, ds * (1.0 - t * t)
    else:
        return ds, ds
