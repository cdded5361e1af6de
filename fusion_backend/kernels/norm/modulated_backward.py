"""Backward of the modulated norms in modulated.py: gradients of x, scale, shift, weight and bias.

With u the normalised value and g = dy · (1 + scale) · weight, dx = rstd (g - u mean(g u) -
mean(g)), without mean(g) where the norm is not centred. All other gradients follow from two sums
over the tokens of a sample, P = sum(dy · u) and D = sum(dy), `[b, n]`: dshift = D, dscale = weight
P + bias D, and over samples dweight = sum((1 + scale) P) and dbias = sum((1 + scale) D).

Programs walk through tokens of one sample with both sums in registers. Another kernel adds up those
of a sample in order, so that the bits are the same every time. Sums in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.common.vectors import row_vector
from fusion_backend.kernels.norm.backward_short import backward_config
from fusion_backend.kernels.norm.modulated import (
    Modulation,
    by_samples,
    by_tokens,
    sizes,
    strips_of,
)
from fusion_backend.kernels.norm.weight_sums import add_up_config, write_sums


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    modulation: Modulation,
    needs: Mapping[str, bool],
    config: Config | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias, scale and shift, each contiguous and of its argument's
    shape and dtype; None where nobody needs it.

    dy and x are `[b, ..., n]`, mean (unread where the norm is not centred) and rstd `[rows]` in
    fp32.
    """
    weight, bias, scale, shift, _, _ = modulation
    of_scale, of_shift, of_weight, of_bias = (
        given is not None and needs[name]
        for name, given in dict(scale=scale, shift=shift, weight=weight, bias=bias).items()
    )
    products = of_scale or of_weight
    plain = of_shift or of_bias or (of_scale and bias is not None)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs["x"] else None
    if not (products or plain or needs["x"]):
        return (None,) * 5
    sums, strips = sums_of_strips(dy, x, mean, rstd, modulation, dx, products, plain, config)
    # what is a gradient as it is gets its dtype at once
    alone = weight is None and bias is None
    whole = of_scale and alone and same_samples(scale, x)
    dtypes = (
        scale.dtype if whole else torch.float32,
        shift.dtype if of_shift and alone and same_samples(shift, x) else torch.float32,
    )
    p, d = add_up(sums, strips, x, dtypes, products, plain)
    dweight, dbias, dscale = None, None, p
    factor = None if alone else 1 + scale.float().reshape(-1, x.shape[-1])
    if of_weight:
        dweight = (factor * p).sum(0).to(weight.dtype)
    if of_bias:
        dbias = (factor * d).sum(0).to(bias.dtype)
    if of_scale and weight is not None:
        dscale = p * weight.float()
    if of_scale and bias is not None:
        dscale = dscale + d * bias.float()
    return (
        dx,
        dweight,
        dbias,
        shaped(dscale, scale, x) if of_scale else None,
        shaped(d, shift, x) if of_shift else None,
    )


def same_samples(t: Tensor, x: Tensor) -> bool:
    """Has every sample a row of its own?"""
    return statically_known_true(t.shape[0] == x.shape[0])


def shaped(gradient: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """The gradients `[b, n]` of all samples, as that of t."""
    if not same_samples(t, x):
        gradient = gradient.sum(0, keepdim=True)
    return gradient.to(t.dtype).reshape(t.shape)


def sums_of_strips(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, modulation: Modulation, dx: Tensor | None,
    products: bool, plain: bool, config: Config | None,
) -> tuple[Tensor | None, int]:  # fmt: skip
    """Fills dx; the wanted sums of each program, `[wanted, b · strips, n]` in fp32, and how many
    strips a sample has. Grid: strips of all samples.
    """
    samples, tokens, n = sizes(x)
    config = config or backward_config(n)
    strips = strips_of(samples, tokens, config, x.device)
    programs, wanted, sums = samples * strips, products + plain, None
    if wanted:
        sums = torch.empty((wanted, programs, n), dtype=torch.float32, device=x.device)
    (dy, dy_gap, dy_stride), (rows, x_gap, x_stride) = by_tokens(dy), by_tokens(x)
    scale, scale_stride = by_samples(modulation.scale)
    launch(
        modulated_norm_backward_kernel, (programs,),
        dy, rows, modulation.weight, scale, mean if modulation.centred else None, rstd, dx, sums,
        tokens, dy_gap, x_gap, strips,
        DY_STRIDE=dy_stride, X_STRIDE=x_stride, SCALE_STRIDE=scale_stride, N=n,
        PRODUCTS=products, PLAIN=plain,
        BLOCK=config.block, ROWS=config.rows, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return sums, strips


# Bytes: dy and x once, dx once, 8 a program and column.
@triton.jit
def modulated_norm_backward_kernel(
    DY, X, W, SCALE, MEAN, RSTD, DX, SUMS, tokens, dy_gap, x_gap, strips,
    DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, N: tl.constexpr,
    PRODUCTS: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, strip = program // strips, tl.program_id(0) % strips
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    inside = col < N
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    if DX is not None:
        factor = 1.0 + row_vector(SCALE + sample * SCALE_STRIDE, lane, N).to(tl.float32)
        if W is not None:
            factor *= row_vector(W, lane, N).to(tl.float32)
    for top in tl.range(strip * ROWS, tokens, strips * ROWS, num_stages=STAGES):
        token = (top + tl.arange(0, ROWS))[:, None]
        there = token < tokens
        keep = there & inside
        row = sample * tokens + token
        g = tl.load(DY + (sample * dy_gap + token) * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        u = tl.load(X + (sample * x_gap + token) * X_STRIDE + col, keep, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, there, 0.0)
        if MEAN is not None:
            u = tl.where(inside, u - tl.load(MEAN + row, there, 0.0), 0.0)
        u *= rstd
        if PRODUCTS:
            products += g * u
        if PLAIN:
            plain += g
        if DX is not None:
            g *= factor
            d = g - u * (tl.sum(g * u, 1, keep_dims=True) / N)
            if MEAN is not None:
                d -= tl.sum(g, 1, keep_dims=True) / N
            tl.store(DX + row * N + col, d * rstd, keep)
    if SUMS is not None:
        write_sums(
            SUMS, tl.sum(products, 0, keep_dims=True), tl.sum(plain, 0, keep_dims=True),
            program, tl.num_programs(0).to(tl.int64), col, inside, N, PRODUCTS, PLAIN,
        )  # fmt: skip


def add_up(
    sums: Tensor | None, strips, x: Tensor, dtypes: tuple, products: bool, plain: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The sums of products and the plain ones, `[b, n]` in these dtypes, from those of all
    programs; None for what is not wanted. Grid: blocks of columns of each sample.
    """
    if sums is None:
        return None, None
    samples, _, n = sizes(x)
    p, d = (
        torch.empty((samples, n), dtype=dtype, device=sums.device) if need else None
        for dtype, need in zip(dtypes, (products, plain), strict=True)
    )
    config = add_up_config(strips, n)
    blocks = (n + config["COLS"] - 1) // config["COLS"]
    launch(modulated_norm_sums_kernel, (samples * blocks,), sums, p, d, strips, blocks, N=n,
           **config)  # fmt: skip
    return p, d


# Bytes: 4 a strip and column, for each of the two.
@triton.jit
def modulated_norm_sums_kernel(
    SUMS, P, D, strips, blocks, N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr
):
    sample, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    col = (block * COLS + tl.arange(0, COLS))[None, :]
    inside = col < N
    p = tl.zeros([ROWS, COLS], tl.float32)
    d = tl.zeros([ROWS, COLS], tl.float32)
    samples = tl.num_programs(0) // blocks
    for top in tl.range(0, strips, ROWS):
        strip = top + tl.arange(0, ROWS)[:, None]
        at = SUMS + (sample * strips + strip) * N + col
        keep = (strip < strips) & inside
        if P is not None:
            p += tl.load(at, keep, 0.0)
            at += samples.to(tl.int64) * strips * N
        if D is not None:
            d += tl.load(at, keep, 0.0)
    at = sample * N + col
    if P is not None:
        tl.store(P + at, tl.sum(p, 0, keep_dims=True), inside)
    if D is not None:
        tl.store(D + at, tl.sum(d, 0, keep_dims=True), inside)
