"""Logits in padded rows, and the gradient of their cross entropy in rows padded alike.

Where the number of classes v is no multiple of 8, rows of v numbers in 16 bits begin at places that
the library's fast products cannot read. Each row is followed by as many numbers as fill its last
line of 128 bytes: in the logits they are of no consequence, in the gradient they are 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch

ALIGNED, LINE = 16, 128  # bytes: what fast products need, and what is read at a time


def uneven(dtype: torch.dtype, classes: int) -> bool:
    """Do rows of so many classes begin where fast products cannot read?"""
    return classes * dtype.itemsize % ALIGNED != 0


def padding(dtype: torch.dtype, classes: int) -> int:
    """How many numbers follow the classes of a row."""
    return -classes % (LINE // dtype.itemsize)


def padded_weight(w: Tensor) -> Tensor:
    """w `[k, v]` transposed, with rows of zeros below: `[v + padding, k]`."""
    return F.pad(w.t(), (0, 0, 0, padding(w.dtype, number(w.shape[1]))))


def padded_logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x w + b of x `[rows, k]`, as `[rows, v + padding]`."""
    wide = padded_weight(w).t()
    if b is None:
        return x @ wide
    return torch.addmm(F.pad(b, (0, padding(b.dtype, number(b.shape[0])))), x, wide)


def gradient(
    logits: Tensor, kept: Tensor, target: Tensor, scale: Tensor, ignore_index: int,
    smoothing: float, classes: int, how: tuple[int, int, int] = (4096, 8, 2),
) -> Tensor:  # fmt: skip
    """(softmax - (1 - smoothing) onehot - smoothing / v) · scale, 0 where the target is
    ignore_index and in the padding. Like the logits, which are `[rows, v + padding]`, contiguous.

    kept is what `loss.cross_entropy.forward` keeps of the v classes, `[2, rows]` in fp32; target
    `[rows]` int64, contiguous; scale in fp32, one number or `[rows]`. Grid: rows.
    """
    rows, width = logits.shape
    out = torch.empty_like(logits)
    block, warps, stages = how
    block = min(block, triton.next_power_of_2(number(width)))
    launch(
        padded_gradient_kernel, (rows,),
        logits, out, kept, target, scale, ignore_index, smoothing,
        EACH=scale.dim() > 0, V=classes, WIDTH=number(width), BLOCK=block,
        num_warps=min(warps, max(4, block // 512)), STAGES=stages,
    )  # fmt: skip
    return out


# Bytes: logits once, their gradient once. Loads and stores reach into the padding, so that all of
# them are of 16 bytes a thread.
@triton.jit
def padded_gradient_kernel(
    X, D, KEPT, TARGET, SCALE, ignore_index, smoothing,
    EACH: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    target, total = tl.load(TARGET + row), tl.load(KEPT + row)
    scale = tl.load(SCALE + (row if EACH else 0))
    smooth = tl.cast(smoothing, tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        col = start + lane
        x = tl.load(X + row * WIDTH + col, col < WIDTH, 0.0).to(tl.float32)
        d = tl.exp2((x - total) * 1.4426950408889634) - smooth / V
        d -= tl.where(col == target, 1.0 - smooth, 0.0)
        d = tl.where((target == ignore_index) | (col >= V), 0.0, d * scale)
        tl.store(D + row * WIDTH + col, d, col < WIDTH)
