"""RMS normalisation of heads and their rotary position embedding.

n = x / sqrt(mean(x²) + eps) · (weight + offset); y = n · cos + rotate(n) · sin. The elements of a
head are rotated in pairs (n1, n2): y1 = n1 · cos1 - n2 · sin1, y2 = n2 · cos2 + n1 · sin2. The
second element stands half a head behind the first, or is its neighbour. norm_rotary_backward.py has
the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Broadcast

MAX_HEAD = 512  # elements of a head, which a program holds
TILE = 1024  # elements of a program


class Heads(NamedTuple):
    """How many heads and positions a program takes, and its warps. Only the backward has programs,
    so many a multiprocessor, which walk through the tiles, and stages, to read ahead of them.
    """

    heads: int
    positions: int
    warps: int
    programs: int = 0
    stages: int = 0


def heads_config(heads: int, d: int) -> Heads:
    """16 elements a thread: as many heads as are left over at most by a quarter, then positions."""
    block = 2 * triton.next_power_of_2(d // 2)
    fits = max(1, TILE // block)
    each = min(fits, triton.next_power_of_2(heads))
    while (heads + each - 1) // each * each * 4 > heads * 5:
        each //= 2
    return Heads(each, max(1, fits // each), 2)


def heads_axis(x: Tensor, cos: Tensor, sin: Tensor) -> int | None:
    """The dimension of x along which one row of cos and of sin serves all heads: -3, or -2, where
    heads stand behind positions. None where there is neither. x of two dimensions has one head.
    """
    if x.dim() < 3:
        return -3

    def shared(axis: int) -> bool:
        return all(
            t.dim() < -axis
            or statically_known_true(t.shape[axis] == 1)
            or statically_known_true(t.stride(axis) == 0)
            for t in (cos, sin)
        )

    return next((axis for axis in (-3, -2) if shared(axis)), None)


class Geometry:
    """How kernels number heads [batches, length, heads], and where they find them.

    x is `[..., d]` of up to four dimensions, cos and sin broadcast to it. Sizes may be symbolic,
    but for heads and d.
    """

    def __init__(self, x: Tensor, cos: Tensor, sin: Tensor):
        axis = heads_axis(x, cos, sin)
        assert axis is not None
        self.x = x
        self.order = (-4, -2, -3) if axis == -3 else (-4, -3, -2)
        batches, length, heads = (number(x.shape[i]) if -i <= x.dim() else 1 for i in self.order)
        self.length, self.heads, self.d = length, heads, number(x.shape[-1])
        self.positions = batches * length
        self.rows = self.positions * heads

    def strides(self, t: Tensor) -> list:
        """The distances of batches, positions and heads of x, or of what broadcasts to it."""
        found = Broadcast(self.x, t).strides
        return [number(found[i]) for i in self.order]

    def constants(self, config: Heads) -> dict:
        return dict(
            HEADS=self.heads, D=self.d, BLOCK=triton.next_power_of_2(self.d // 2),
            EACH=config.heads, POSITIONS=config.positions, num_warps=config.warps,
        )  # fmt: skip

    def tiles(self, config: Heads):
        """Of config.heads heads of config.positions positions."""
        groups = (self.heads + config.heads - 1) // config.heads
        return (self.positions + config.positions - 1) // config.positions * groups


def forward(
    x: Tensor, weight: Tensor, offset: float, eps: float, cos: Tensor, sin: Tensor, style: str,
    save: bool, config: Heads | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y in the dtype that x, weight, cos and sin have together, in memory as torch.empty_like(x),
    and 1 / sqrt(mean(x²) + eps) in fp32, one for each head in the order of Geometry: empty unless
    saved.

    x `[..., d]`, weight `[d]`, cos and sin, which broadcast to x, are in fp32, bf16 or fp16; see
    heads_axis for what they share. Elements of a row are one apart, all else has any strides.
    Grid: tiles of heads and positions, the heads of a position one after the other.
    """
    at = Geometry(x, cos, sin)
    config = config or heads_config(at.heads, at.d)
    y = torch.empty_like(x, dtype=dtype_of(x, weight, cos, sin))
    rstd = torch.empty(at.rows if save else 0, dtype=torch.float32, device=x.device)
    launch(
        norm_rotary_kernel, (at.tiles(config),),
        x, weight, cos, sin, y, rstd if save else None, at.positions, at.length, offset, eps,
        *at.strides(x), *at.strides(cos)[:2], *at.strides(sin)[:2], *at.strides(y),
        INTERLEAVED=style == "interleaved", **at.constants(config),
    )  # fmt: skip
    return y, rstd


def dtype_of(*tensors: Tensor) -> torch.dtype:
    """What elementwise arithmetic of the tensors gives."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


@triton.jit
def tile_of(
    tile, positions, length,
    HEADS: tl.constexpr, EACH: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """The batch and the place [POSITIONS, 1, 1] in it, and the head [1, EACH, 1], of a tile, and
    which of them there are.
    """
    groups: tl.constexpr = (HEADS + EACH - 1) // EACH
    position = (tile // groups) * POSITIONS + tl.arange(0, POSITIONS)[:, None, None]
    head = (tile % groups) * EACH + tl.arange(0, EACH)[None, :, None]
    keep = (position < positions) & (head < HEADS)
    batch, place = (position // length).to(tl.int64), (position % length).to(tl.int64)
    return batch, place, head.to(tl.int64), keep


@triton.jit
def read_pairs(ROWS, keep, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The elements that are rotated together, of rows [a, b, 1]: both [a, b, BLOCK] in fp32."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(ROWS + col, keep & (col < D), 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        first = tl.load(ROWS + col, keep & (col < D // 2), 0.0).to(tl.float32)
        second = tl.load(ROWS + D // 2 + col, keep & (col < D // 2), 0.0).to(tl.float32)
    return first, second


@triton.jit
def write_pairs(
    ROWS, first, second, keep, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """What read_pairs has read, written back."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        tl.store(ROWS + col, both, keep & (col < D))
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        tl.store(ROWS + col, first, keep & (col < D // 2))
        tl.store(ROWS + D // 2 + col, second, keep & (col < D // 2))


# Bytes: x once, y once, 4 a head where saved; a row of cos and of sin for EACH heads, which the
# other batches and heads find in the L2. A thread reads cos, sin and weight for the elements that
# it has, from L1 for all heads but one: a row without heads would go to them by shared memory.
@triton.jit
def norm_rotary_kernel(
    X, W, COS, SIN, Y, RSTD, positions, length, offset, eps,
    x_batch, x_place, x_head, cos_batch, cos_place, sin_batch, sin_place, y_batch, y_place, y_head,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    batch, place, head, keep = tile_of(tl.program_id(0), positions, length, HEADS, EACH, POSITIONS)
    all_heads = tl.zeros([POSITIONS, EACH, 1], tl.int32)
    row = X + batch * x_batch + place * x_place + head * x_head
    x1, x2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
    row = COS + batch * cos_batch + place * cos_place + all_heads
    cos1, cos2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
    row = SIN + batch * sin_batch + place * sin_place + all_heads
    sin1, sin2 = read_pairs(row, keep, D, BLOCK, INTERLEAVED)
    w1, w2 = read_pairs(W + all_heads, True, D, BLOCK, INTERLEAVED)
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 2, keep_dims=True) / D + tl.cast(eps, tl.float32))
    if RSTD is not None:
        tl.store(RSTD + (batch * length + place) * HEADS + head, rstd, keep)
    x1 *= rstd * (w1 + tl.cast(offset, tl.float32))
    x2 *= rstd * (w2 + tl.cast(offset, tl.float32))
    row = Y + batch * y_batch + place * y_place + head * y_head
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    write_pairs(row, y1, y2, keep, D, BLOCK, INTERLEAVED)
