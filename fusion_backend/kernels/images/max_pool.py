"""The largest element of each window of an image, and its gradient.

The forward keeps the place of each largest element in its window, in 8 bits: the first of equal
ones, and the last NaN, as in torch. The gradient of an element of the input is the sum of the
gradients of the windows whose largest it is: it is read from these windows, and nothing is written
by two programs. Sums are in fp32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.images.tiles import Images, Tile, form_of, images, places
from fusion_backend.reporting.reject import Settled

ONLY_TRAINING = Settled("without a gradient Inductor computes it in one kernel with its neighbours")


class Windows(NamedTuple):
    """How the windows lie; ceil: the last ones may end outside of the image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil: bool

    def pool(self, x: Tensor, indices: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        kernel, stride, padding, ceil = self
        how = dict(ceil_mode=ceil, return_indices=indices)
        return F.max_pool2d(x, kernel, stride, padding, **how)

    def size(self, x: Tensor) -> tuple[int, int]:
        """The height and width of the result. A window begins in the image or in the padding
        before it.
        """
        found = []
        for n, k, step, pad in zip(x.shape[-2:], *self[:3], strict=True):
            count = (n + 2 * pad - k + (step - 1) * self.ceil) // step + 1
            found.append(count - (self.ceil and (count - 1) * step >= n + pad))
        return tuple(found)

    def constants(self) -> dict:
        (kh, kw), (sh, sw), (ph, pw), _ = self
        return dict(KH=kh, KW=kw, SH=sh, SW=sw, PH=ph, PW=pw)


@functools.cache
def windows_of(text: str) -> Windows:
    """Read from "3,3 2,2 1,1": kernel, stride and padding, or "3,3 2,2 1,1 ceil"."""
    kernel, stride, padding, *ceil = text.split()
    pairs = (tuple(int(n) for n in pair.split(",")) for pair in (kernel, stride, padding))
    return Windows(*pairs, bool(ceil))


def elements_of(x: Images) -> int:
    """Those of a tile: a warp's where neighbours in a row are in the same windows."""
    return 2048 if x.LAST else 256


def forward(x: Tensor, windows: str, save: bool, how: Tile | None = None) -> tuple[Tensor, Tensor]:
    """The largest elements, and their places in the windows, int8; an empty tensor if they are not
    saved. Both in the memory format of x.

    x is `[n, c, h, w]`, contiguous or channels-last, in fp32, bf16 or fp16. Grid: tiles of y.
    """
    of, read = windows_of(windows), images(x)
    height, width = of.size(x)
    written, shape = read._replace(H=height, W=width), (*x.shape[:2], height, width)
    y = flat(shape, x.dtype, x.device)
    kept = flat(shape if save else (0,), torch.int8, x.device)
    grid, how = written.grid(how, elements_of(read))
    launch(
        max_pool_kernel, grid, x, y, kept, read.outer, HEIGHT=read.H, WIDTH=read.W, SAVE=save,
        **of.constants(), **written.constants(),
        ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
    )  # fmt: skip
    y = shaped(y, shape, form_of(x))
    return y, shaped(kept, shape, form_of(x)) if save else kept


def backward(dy: Tensor, x: Tensor, kept: Tensor, windows: str, how: Tile | None = None) -> Tensor:
    """dx in the shape, dtype and memory format of x; dy and the places are copied where they have
    another. Grid: tiles of dx.
    """
    of, written, form = windows_of(windows), images(x), form_of(x)
    height, width = of.size(x)
    dx = flat(x.shape, x.dtype, x.device)
    grid, how = written.grid(how, elements_of(written))
    launch(
        max_pool_backward_kernel, grid,
        dy.contiguous(memory_format=form), kept.contiguous(memory_format=form), dx, written.outer,
        HEIGHT=height, WIDTH=width, **of.constants(), **written.constants(),
        ROWS=how.rows, COLUMNS=how.columns, num_warps=how.warps,
    )  # fmt: skip
    return shaped(dx, x.shape, form)


def places_of(x: Tensor, windows: str) -> Tensor:
    """What the forward keeps, from torch's indices of an image."""
    of, w = windows_of(windows), x.shape[3]
    (_, kw), (sh, sw), (ph, pw), _ = of
    _, at = of.pool(x, indices=True)
    i, j = (torch.arange(n, device=x.device) for n in at.shape[2:])
    down, across = at // w - (i * sh - ph)[:, None], at % w - (j * sw - pw)
    return (down * kw + across).to(torch.int8)


# Bytes: x once, y once, and of what is kept one for each element of y. H and W are those of y.
@triton.jit
def max_pool_kernel(
    X, Y, KEPT, outer, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SAVE: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, i, j, c, keep = places(outer, H, W, C, LAST, ROWS, COLUMNS)
    top, left = i * SH - PH, j * SW - PW
    X += image * (HEIGHT * WIDTH * C)
    best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    # of a window of -infinity the first element in the image
    kept = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0) + tl.zeros((ROWS, COLUMNS), tl.int32)
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            inside = (top + kh >= 0) & (top + kh < HEIGHT) & (left + kw >= 0) & (left + kw < WIDTH)
            at = ((o * HEIGHT + top + kh) * WIDTH + left + kw) * C + c
            x = tl.load(X + at, keep & inside, float("-inf")).to(tl.float32)
            larger = (x > best) | (x != x)
            best = tl.where(larger, x, best)
            kept = tl.where(larger, kh * KW + kw, kept)
    at = image * (H * W * C) + (((o * H + i) * W + j) * C + c)
    tl.store(Y + at, best, keep)
    if SAVE:
        tl.store(KEPT + at, kept.to(tl.int8), keep)


# Bytes: dy and the places once, dx once. H and W are those of dx.
@triton.jit
def max_pool_backward_kernel(
    DY, KEPT, DX, outer, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, o, i, j, c, keep = places(outer, H, W, C, LAST, ROWS, COLUMNS)
    DY += image * (HEIGHT * WIDTH * C)
    KEPT += image * (HEIGHT * WIDTH * C)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # the windows that contain an element, from the last one on
    for a in tl.static_range((KH + SH - 1) // SH):
        down = (i + PH) // SH - a
        kh = i + PH - down * SH
        for b in tl.static_range((KW + SW - 1) // SW):
            across = (j + PW) // SW - b
            kw = j + PW - across * SW
            inside = (down >= 0) & (down < HEIGHT) & (across >= 0) & (across < WIDTH)
            inside &= (kh < KH) & (kw < KW)
            at = ((o * HEIGHT + down) * WIDTH + across) * C + c
            largest = tl.load(KEPT + at, keep & inside, -1) == kh * KW + kw
            total += tl.load(DY + at, keep & inside & largest, 0.0).to(tl.float32)
    at = ((o * H + i) * W + j) * C + c
    tl.store(DX + image * (H * W * C) + at, total, keep)
