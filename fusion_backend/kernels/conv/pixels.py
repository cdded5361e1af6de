"""The convolution of images of a few channels, as at the start of a network, and the gradient of
its weight.

x is `[b, c, h, w]`, weight `[o, c, p, q]`. For a pixel of the result, a row of its window is c · q
numbers, which are gathered from x as it lies in memory, channels-last or in planes; with the rows
of all pixels of a tile, and those of the weight, that is a product of c · q. The result is the sum
of p such products. cuDNN, which wants the channels of a pixel in multiples of 8 or 16, pads x in
memory, and reaches a small part of the speed that its convolutions of more channels have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.compat.torch import suggest_memory_format
from fusion_backend.kernels.common.inputs import number
from fusion_backend.kernels.common.launch import interpreted, launch
from fusion_backend.kernels.common.results import flat, shaped
from fusion_backend.kernels.common.rows import multiprocessors
from fusion_backend.kernels.conv.library import Windows, windows_of
from fusion_backend.kernels.gemm.main_loop import multiply

CHANNELS = 4  # at most
LONGEST = 256  # numbers of a window, rows and columns padded to powers of two


def padded_row(weight: Tensor) -> int:
    """The numbers of a row of a window, as many as products are made of."""
    return max(16, triton.next_power_of_2(number(weight.shape[1]) * number(weight.shape[3])))


def padded_window(weight: Tensor) -> int:
    return padded_row(weight) * triton.next_power_of_2(number(weight.shape[2]))


def in_planes(x: Tensor, weight: Tensor) -> bool:
    """Does conv2d return planes? It returns channels-last if one of its operands is that."""
    return all(suggest_memory_format(t) != torch.channels_last for t in (x, weight))


def described(text: str) -> tuple[Windows, bool]:
    """Read from "2,2 1,1 1,1 1 last": how the windows lie, and whether the result is channels-last
    though neither the image nor the weight need be.
    """
    return windows_of(text.removesuffix(" last")), text.endswith(" last")


def constants_of(x: Tensor, weight: Tensor, windows: Windows) -> dict:
    (o, c, p, q), (sy, sx), (py, px) = map(number, weight.shape), windows.stride, windows.padding
    xc, xy, xx = map(number, x.stride()[1:])
    sizes = dict(C=c, P=p, Q=q, OUTS=o, SY=sy, SX=sx, PY=py, PX=px, XC=xc, XY=xy, XX=xx)
    return sizes | dict(ROW=padded_row(weight), UPCAST=interpreted(pixels_kernel))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, planes: bool,
    pixels: int = 128, warps: int = 4,
) -> Tensor:  # fmt: skip
    """y `[b, o, h', w']` of x's dtype, in planes or else channels-last.

    x `[b, c, h, w]` is in bf16 or fp16, of any strides; weight `[o, c, p, q]` and bias `[o]` have
    its dtype. Grid: tiles of pixels by blocks of output channels.
    """
    b, (o, _, p, q), (h, w) = x.shape[0], map(number, weight.shape), map(number, x.shape[2:])
    (sy, sx), (py, px) = windows.stride, windows.padding
    height, width = (h + 2 * py - p) // sy + 1, (w + 2 * px - q) // sx + 1
    form = torch.contiguous_format if planes else torch.channels_last
    y = flat((b, o, height, width), x.dtype, x.device)
    out = min(128, max(16, triton.next_power_of_2(o)))
    wo, wc, wy, wx = map(number, weight.stride())
    launch(
        pixels_kernel, (triton.cdiv(b * height * width, pixels) * triton.cdiv(o, out),), x, weight,
        bias, y, b, h, w, height, width, x.stride(0), WO=wo, WC=wc, WY=wy, WX=wx, PLANES=planes,
        PIXELS=pixels, OUT=out, **constants_of(x, weight, windows), num_warps=warps,
    )  # fmt: skip
    return shaped(y, (b, o, height, width), form)


@triton.jit
def corners(
    pixel, height, width, xb, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr,
):  # fmt: skip
    """Of pixels of the result: where their image begins, and the first row and column of their
    windows, which may be negative.
    """
    image, place = pixel // (height * width), pixel % (height * width)
    return image * xb, place // width * SY - PY, place % width * SX - PX


@triton.jit
def pixels_kernel(
    X, W, B, Y, b, h, w, height, width, xb, WO: tl.constexpr, WC: tl.constexpr, WY: tl.constexpr,
    WX: tl.constexpr, C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, OUTS: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, XC: tl.constexpr,
    XY: tl.constexpr, XX: tl.constexpr, PLANES: tl.constexpr, PIXELS: tl.constexpr,
    OUT: tl.constexpr, ROW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (OUTS + OUT - 1) // OUT
    pixel = (tl.program_id(0) // blocks).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    out = tl.program_id(0) % blocks * OUT + tl.arange(0, OUT)
    image, top, left = corners(pixel, height, width, xb, SY, SX, PY, PX)
    exists = pixel < b * height * width
    n = tl.arange(0, ROW)  # channel by channel of each column
    column, channel = n // C, n % C
    x = left.to(tl.int32)[:, None] + column[None, :]
    inside = exists[:, None] & (x >= 0) & (x < w) & (column < Q)[None, :]
    at = image[:, None] + (x * XX + (channel * XC)[None, :])
    weight = W + (out * WO)[None, :] + (channel * WC + column * WX)[:, None]
    there = (column < Q)[:, None] & (out < OUTS)[None, :]
    acc = tl.zeros([PIXELS, OUT], tl.float32)
    for i in tl.static_range(P):
        y = top + i
        keep = inside & ((y >= 0) & (y < h))[:, None]
        rows = tl.load(X + at + (y * XY)[:, None], keep, 0.0)
        acc = multiply(rows, tl.load(weight + i * WY, there, 0.0), acc, "ieee", UPCAST)
    if B is not None:
        acc += tl.load(B + out, out < OUTS, 0.0).to(tl.float32)[None, :]
    if PLANES:
        size = height * width
        to = (pixel // size * (OUTS * size) + pixel % size)[:, None] + (out * size)[None, :]
    else:
        to = (pixel * OUTS)[:, None] + out[None, :]
    tl.store(Y + to, acc, exists[:, None] & (out < OUTS)[None, :])


def weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, pixels: int = 64, warps: int = 8,
    programs: int = 2,
) -> Tensor:  # fmt: skip
    """The gradient of weight `[o, c, p, q]` in fp32, of dy `[b, o, h', w']`. Grid: programs by
    blocks of output channels; each takes turns with the tiles of pixels.
    """
    if dy.stride(2) != dy.shape[3] * dy.stride(3):
        dy = dy.contiguous()
    o, c, p, q = map(number, weight.shape)
    out, pieces = min(64, max(16, triton.next_power_of_2(o))), programs * multiprocessors(x.device)
    sums = torch.empty((pieces, o, p, q, c), dtype=torch.float32, device=x.device)
    (h, w), (height, width) = map(number, x.shape[2:]), map(number, dy.shape[2:])
    launch(
        pixels_gradient_kernel, (pieces * triton.cdiv(o, out),), dy, x, sums, x.shape[0], h, w,
        height, width, x.stride(0), dy.stride(0), YC=number(dy.stride(1)), YX=number(dy.stride(3)),
        **constants_of(x, weight, windows), PIXELS=pixels, OUT=out,
        TALL=triton.next_power_of_2(p), PIECES=pieces, num_warps=warps,
    )  # fmt: skip
    return sums.sum(0).permute(0, 3, 1, 2)


def like(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the dtype of the weight, and as torch lays it out."""
    return gradient.to(weight.dtype, memory_format=suggest_memory_format(weight))


@triton.jit
def pixels_gradient_kernel(
    DY, X, SUMS, b, h, w, height, width, xb, yb, YC: tl.constexpr, YX: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, OUTS: tl.constexpr, SY: tl.constexpr,
    SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, XC: tl.constexpr, XY: tl.constexpr,
    XX: tl.constexpr, PIXELS: tl.constexpr, OUT: tl.constexpr, ROW: tl.constexpr,
    UPCAST: tl.constexpr, TALL: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (OUTS + OUT - 1) // OUT
    piece = tl.program_id(0) // blocks
    out = tl.program_id(0) % blocks * OUT + tl.arange(0, OUT)
    n = tl.arange(0, TALL * ROW)  # the numbers of a window, row by row
    line, column, channel = n // ROW, n % ROW // C, n % ROW % C
    real = (line < P) & (column < Q)
    offset = line * XY + column * XX + channel * XC
    acc = tl.zeros([OUT, TALL * ROW], tl.float32)
    size = height * width
    for t in range(piece, tl.cdiv(b * size, PIXELS), PIECES):
        pixel = tl.cast(t, tl.int64) * PIXELS + tl.arange(0, PIXELS)
        image, top, left = corners(pixel, height, width, xb, SY, SX, PY, PX)
        exists = pixel < b * size
        y, x = top[:, None] + line[None, :], left[:, None] + column[None, :]
        keep = exists[:, None] & real[None, :] & (y >= 0) & (y < h) & (x >= 0) & (x < w)
        at = image + top * XY + left * XX
        windows = tl.load(X + at[:, None] + offset[None, :], keep, 0.0)
        to = pixel // size * yb + pixel % size * YX
        there = (out < OUTS)[:, None] & exists[None, :]
        dy = tl.load(DY + (out * YC)[:, None] + to[None, :], there, 0.0)
        acc = multiply(dy, windows, acc, "ieee", UPCAST)
    to = piece.to(tl.int64) * (OUTS * P * Q * C) + out[:, None] * (P * Q * C)
    to += (line * (Q * C) + column * C + channel)[None, :]
    tl.store(SUMS + to, acc, (out < OUTS)[:, None] & real[None, :])
