"""Group normalisation: act(group_norm(x, groups) · weight + bias) over groups of channels in dimension 1.

x is `[b, c, ...]`, dense, in fp32, bf16 or fp16, a group of it up to 1048576 elements long; weight and bias `[c]` may
be missing. act is silu or nothing. Computed in fp32; backward keeps x and the mean and rstd of each group.
Source: Wu and He 2018, torch.nn.functional.group_norm.

backward: with u = (x - mean) · rstd, z = u · weight + bias and g = dy · act'(z), the gradients of weight and bias are
the sums of g · u and g over the planes of a channel; with h = g · weight, dx = rstd (h - mean(h) - u mean(h · u)).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch
from fusion_backend.kernels.activations import activate, activated
from fusion_backend.kernels.inputs import dense, dynamic, memory, number, reject_dtypes, reject_dynamic
from fusion_backend.kernels.norms_backward import add_up
from fusion_backend.kernels.rows import RESULTS, UNMEASURED, reject_vectors

MAX_GROUP = 1 << 20  # elements of the largest group accepted: one program works on it


@Pattern(inductor="reduction")
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: Literal["identity", "silu"]
) -> Tensor:
    alone = weight is None and bias is not None  # torch has no gradient then
    y = F.group_norm(x, groups, weight, None if alone else bias, eps)
    return activate(y + bias.reshape(-1, *[1] * (x.dim() - 2)) if alone else y, act)


@group_norm.near_miss
def _(x, groups, weight, bias, eps, act):
    """of every instance and channel"""
    return activate(F.instance_norm(x, weight=weight, bias=bias, eps=eps), act)


@group_norm.guard
def _(x, groups, weight, bias, eps, act):
    no = reject_dtypes(x=x, weight=weight, bias=bias) or reject_dynamic(groups=groups, eps=eps)
    if no or any(map(dynamic, x.shape[1:])):
        return no or Reject("the number of channels or the size of a plane is dynamic")
    if not dense(x, range(x.dim())):
        return Reject(f"x is not dense in its own order (channels-last, for example): {memory(x)}")
    if not 1 <= size_of(x, groups) <= MAX_GROUP:
        return Reject(f"a group of {size_of(x, groups)} elements is not between 1 and {MAX_GROUP}")
    return reject_vectors(weight=weight, bias=bias)


def size_of(x, groups) -> int:
    return math.prod(map(number, x.shape[1:])) // groups


@group_norm.worthwhile
def _(x, groups, weight, bias, eps, act, training):
    if statically_known_true(x.numel() < 1 << 24):
        return UNMEASURED
    if training and statically_known_true(x.shape[0] * groups < 264):
        return Reject(f"Inductor trains faster with fewer than 264 groups: a program has one ({RESULTS})")


@group_norm.kernel(saves=("mean", "rstd"))
def _(x, groups, weight, bias, eps, act, save):
    return forward(x, groups, weight, bias, eps, act, save)


def forward_config(size: int) -> tuple[int, int]:
    """Elements of a tile and warps: 32 elements a thread where the group may be held, else 16."""
    return (16384, 16) if size <= 16384 else (8192, 16)


def backward_config(size: int) -> tuple[int, int]:
    """Elements of a tile and warps: 16 elements a thread, of two tensors."""
    return 8192, 16


def shape_of(x, groups, lanes: int, warps: int) -> dict:
    """Channels a group, elements a plane, and the tile that walks through them: CH planes, BLOCK elements of each.
    Smaller tiles have fewer warps, 8 elements a thread."""
    per, inner = number(x.shape[1]) // groups, math.prod(map(number, x.shape[2:]))
    block = min(lanes, triton.next_power_of_2(inner))
    ch = min(lanes // block, triton.next_power_of_2(per))
    held = ch >= per and block >= inner  # one tile is the group
    warps = min(warps, max(1, ch * block // 256))
    return dict(GROUPS=groups, PER=per, INNER=inner, CH=ch, BLOCK=block, HELD=held, num_warps=warps)


def forward(x, groups, weight, bias, eps, act, save, how=None):
    """y, and mean and rstd `[b · groups]` in fp32, empty unless saved. Grid: groups of all samples."""
    y, rows = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[0] * groups
    mean, rstd = (torch.empty(rows if save else 0, dtype=torch.float32, device=x.device) for _ in range(2))
    launch(
        group_norm_kernel, (rows,), x, weight, bias, y, mean if save else None, rstd if save else None, eps, ACT=act,
        **shape_of(x, groups, *(how or forward_config(size_of(x, groups)))),
    )  # fmt: skip
    return y, mean, rstd


@group_norm.saved
def _(x, groups, weight, bias, eps, act):
    x = x.reshape(x.shape[0] * groups, -1).float()
    mean = x.mean(1)
    return mean, torch.rsqrt((x - mean[:, None]).pow(2).mean(1) + eps)


# Bytes: x once, y once; of a group that is not held in registers the second reading comes from L2.
@triton.jit
def group_norm_kernel(
    X, W, B, Y, MEAN, RSTD, eps, GROUPS: tl.constexpr, PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr,
    CH: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    first = group % GROUPS * PER
    size: tl.constexpr = PER * INNER
    X += group * size
    Y += group * size
    if HELD:
        ch, lane = tl.arange(0, CH), tl.arange(0, BLOCK)[None, :]
        at, keep = ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)
        x = tl.load(X + at, keep, 0.0).to(tl.float32)
        mean = tl.sum(x) / size
        x = tl.where(keep, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x) / size + tl.cast(eps, tl.float32))
        tl.store(Y + at, activated(affine(x * rstd, W, B, first + ch, ch < PER), ACT), keep)
    else:
        mean, squares = moments(X, size, CH * BLOCK)
        rstd = tl.rsqrt(squares / size + tl.cast(eps, tl.float32))
        for top in tl.range(0, PER, CH):
            ch = top + tl.arange(0, CH)
            for start in tl.range(0, INNER, BLOCK):
                lane = start + tl.arange(0, BLOCK)[None, :]
                at, keep = ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)
                u = (tl.load(X + at, keep, 0.0).to(tl.float32) - mean) * rstd
                tl.store(Y + at, activated(affine(u, W, B, first + ch, ch < PER), ACT), keep)
    if RSTD is not None:
        tl.store(MEAN + group, mean)
        tl.store(RSTD + group, rstd)


@triton.jit
def affine(u, W, B, channel, inside):
    """u · weight + bias of a tile, with a channel a row."""
    if W is not None:
        u *= tl.load(W + channel, inside, 0.0).to(tl.float32)[:, None]
    if B is not None:
        u += tl.load(B + channel, inside, 0.0).to(tl.float32)[:, None]
    return u


@triton.jit
def moments(X, size: tl.constexpr, BLOCK: tl.constexpr):
    """Mean, and sum of squared distances from it, of size elements: Welford's, in each lane."""
    lane = tl.arange(0, BLOCK)
    means = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        x = tl.load(X + start + lane, start + lane < size, 0.0).to(tl.float32)
        delta = x - means
        means = tl.where(start + lane < size, means + delta * (1.0 / (start // BLOCK + 1)), means)
        squares += tl.where(start + lane < size, delta * (x - means), 0.0)
    counts = (size - lane + BLOCK - 1) // BLOCK
    mean = tl.sum(means * counts) / size
    return mean, tl.sum(squares + counts * (means - mean) * (means - mean))


@group_norm.backward
def _(saved, dy):
    needs = [saved.needs[name] for name in ("x", "weight", "bias")]
    args = saved.x, saved.groups, saved.weight, saved.bias, saved.mean, saved.rstd, saved.act
    dx, dw, db = backward(dy, *args, needs)
    return dx, dw, db


def backward(dy, x, groups, weight, bias, mean, rstd, act, needs, how=None):
    """Gradients of x, weight and bias, None where `needs` says no. Grid: groups of all samples."""
    need_x, need_w, need_b = needs[0], needs[1] and weight is not None, needs[2] and bias is not None
    b, c = x.shape[0], number(x.shape[1])
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    sums = torch.empty((need_w + need_b, b, c), dtype=torch.float32, device=x.device) if need_w or need_b else None
    launch(
        group_norm_backward_kernel, (b * groups,), dy.contiguous(), x, weight, bias, mean, rstd, dx, sums, b * c,
        WEIGHT=need_w, BIAS=need_b, ACT=act, **shape_of(x, groups, *(how or backward_config(size_of(x, groups)))),
    )  # fmt: skip
    return dx, *add_up(sums, x.dtype, need_w, need_b)


# Bytes: dy and x once, dx once, 8 a sample and channel; the second reading of a larger group comes from L2.
@triton.jit
def group_norm_backward_kernel(
    DY, X, W, B, MEAN, RSTD, DX, SUMS, channels, WEIGHT: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, INNER: tl.constexpr, ACT: tl.constexpr, CH: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    first = group % GROUPS * PER
    size: tl.constexpr = PER * INNER
    X += group * size
    DY += group * size
    mean = tl.load(MEAN + group)
    rstd = tl.load(RSTD + group)
    if HELD:
        ch, lane = tl.arange(0, CH), tl.arange(0, BLOCK)[None, :]
        at, keep = ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)
        g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT)
        hu, hs = channel_sums(g * u, g, W, SUMS, group * PER + ch, channels, first + ch, ch < PER, WEIGHT, BIAS)
        if DX is not None:
            d = affine(g, W, None, first + ch, ch < PER) - hs / size - u * (hu / size)
            tl.store(DX + group * size + at, d * rstd, keep)
    else:
        hu = 0.0
        hs = 0.0
        for top in tl.range(0, PER, CH):
            ch = top + tl.arange(0, CH)
            gu = tl.zeros([CH, BLOCK], tl.float32)
            gs = tl.zeros([CH, BLOCK], tl.float32)
            for start in tl.range(0, INNER, BLOCK):
                lane = start + tl.arange(0, BLOCK)[None, :]
                at, keep = ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)
                g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT)
                gu += g * u
                gs += g
            some = channel_sums(gu, gs, W, SUMS, group * PER + ch, channels, first + ch, ch < PER, WEIGHT, BIAS)
            hu += some[0]
            hs += some[1]
        if DX is not None:
            for top in tl.range(0, PER, CH):
                ch = top + tl.arange(0, CH)
                for start in tl.range(0, INNER, BLOCK):
                    lane = start + tl.arange(0, BLOCK)[None, :]
                    at, keep = ch[:, None] * INNER + lane, (ch < PER)[:, None] & (lane < INNER)
                    g, u = before_affine(DY + at, X + at, keep, W, B, mean, rstd, first + ch, ch < PER, ACT)
                    d = affine(g, W, None, first + ch, ch < PER) - hs / size - u * (hu / size)
                    tl.store(DX + group * size + at, d * rstd, keep)


@triton.jit
def before_affine(DY, X, keep, W, B, mean, rstd, channel, inside, ACT: tl.constexpr):
    """The gradient of the affine part's result, and what it was applied to: g and u of a tile, g 0 outside."""
    u = (tl.load(X, keep, 0.0).to(tl.float32) - mean) * rstd
    g = tl.load(DY, keep, 0.0).to(tl.float32)
    if ACT == "silu":
        z = affine(u, W, B, channel, inside)
        s = tl.sigmoid(z)
        g *= s * (1.0 + z * (1.0 - s))
    return g, u


@triton.jit
def channel_sums(
    gu, gs, W, SUMS, at, channels, channel, inside, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Sums over planes go to memory; those over channels, weighted, are returned."""
    gu = tl.sum(gu, 1)
    gs = tl.sum(gs, 1)
    if WEIGHT:
        tl.store(SUMS + at, gu, inside)
        at += channels
    if BIAS:
        tl.store(SUMS + at, gs, inside)
    if W is not None:
        w = tl.load(W + channel, inside, 0.0).to(tl.float32)
        gu *= w
        gs *= w
    return tl.sum(gu), tl.sum(gs)


@group_norm.inputs(dict(b=2, c=60, n=4, groups=2), dict(b=16, c=480, n=64, groups=32))
def _(tensor, b, c, n, groups):
    return tensor(b, c, n, n), groups, tensor(c), tensor(c), 1e-5, "identity"
