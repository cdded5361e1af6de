"""Layer and RMS normalisation of rows, with or without dropout and a residual sum before it.

forward: h = dropout(x) + residual, or without either; c = h - mean(h), or h itself where `centred`
is false; rstd = 1 / sqrt(mean(c²) + eps); y = c · rstd · (weight + offset) + bias. All sums are in
fp32. backward.py has the gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.dropout import Dropout, dropout_arguments, dropout_factors
from fusion_backend.kernels.common.inputs import (
    as_rows,
    common_dtype,
    dynamic,
    maybe_rows,
    number,
)
from fusion_backend.kernels.common.launch import launch
from fusion_backend.kernels.common.rows import FEW, MAX_HELD, RESULTS, Config, grid, tuned
from fusion_backend.kernels.common.vectors import row_vector
from fusion_backend.kernels.norm import forward_cooperative as cooperative
from fusion_backend.kernels.norm import forward_split as split
from fusion_backend.kernels.norm.operands import Forward, Norm
from fusion_backend.reporting.reject import BackwardOnly, Reject

SHORT = 32768  # bytes of a row up to which it is held in any case


def not_forward(x: Tensor, residual: bool = False) -> BackwardOnly | None:
    """Where Inductor's forward is as fast: only the backward kernel pays (RMS norms and sums,
    H200).
    """
    size, longest = number(x.shape[-1]) * x.element_size(), SHORT
    if x.element_size() == 2:
        longest = MAX_HELD if residual else SHORT // 2
    held = size <= longest
    if not (held or cooperative.worthwhile(x, None)) or statically_known_true(x.numel() < 4 << 20):
        return BackwardOnly(
            f"Inductor's forward is as fast for long rows and small tensors ({RESULTS})"
        )


def small_in_fp32(x: Tensor, training: bool) -> Reject | None:
    """Where Inductor's training step was faster: in fp32 only tensors that no L2 holds have been
    timed otherwise.
    """
    if training and x.element_size() == 4 and statically_known_true(x.numel() < 1 << 24):
        return Reject(
            "small training steps in fp32 are Inductor's: timed at 0.905 of Inductor on an H200"
        )


def forward(
    x: Tensor, residual: Tensor | None, norm: Norm, save: bool, config: Config | None = None,
    sum_is_read: bool = True, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """y `[..., n]` and h (None without a residual), both contiguous, and mean and rstd `[rows]` in
    fp32: empty unless saved, mean also if not centred. h has the dtype of x + residual, y `dtype`
    or what torch promotes h, weight and bias to. h is empty and not written where nobody, backward
    included, reads the sum.

    x and residual are `[..., n]` in fp32, bf16 or fp16; their columns are one element apart, or
    they are copied. Grid: rows / config.rows, or config.programs a multiprocessor; of few long
    rows, their pieces.
    """
    n, rows = number(x.shape[-1]), x.numel() // number(x.shape[-1])
    shared = config is None and cooperative.worthwhile(x, norm.dropout)
    divided = config is None and split.few_long_rows(rows, n, x.device)
    config = config or config_for(x, residual, norm)
    dtype = dtype or common_dtype(x, residual, norm.weight, norm.bias)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    h_shape, of_sum = x.shape if sum_is_read else (0,), common_dtype(x, residual)
    h = None if residual is None else torch.empty(h_shape, dtype=of_sum, device=x.device)
    (x, rows, stride), (residual, _, residual_stride) = as_rows(x), maybe_rows(residual)
    saved = [save and norm.centred, save]
    mean, rstd = (
        torch.empty(rows if keep else 0, dtype=torch.float32, device=x.device) for keep in saved
    )
    seed, chance = dropout_arguments(norm.dropout)
    operands = Forward(
        x, seed, residual, norm.weight, norm.bias, y, h if sum_is_read else None,
        mean if saved[0] else None, rstd if saved[1] else None, rows, norm.offset or 0.0, norm.eps,
    )  # fmt: skip
    constants = dict(
        STRIDE=stride, RESIDUAL_STRIDE=residual_stride, N=n, CENTRED=norm.centred, **chance
    )
    if divided or shared:
        (split if divided else cooperative).forward(operands, **constants)
        return y, h, mean, rstd
    held = dict(ROWS=config.rows, STAGES=config.stages, EARLY=config.early)
    kernel, rest = (norm_kernel, held) if config.block >= n else (norm_long_kernel, {})
    launch(
        kernel, (grid(rows, config.rows, config.programs, x.device),), *operands,
        BLOCK=config.block, num_warps=config.warps, **rest, **constants,
    )  # fmt: skip
    return y, h, mean, rstd


def config_for(x: Tensor, residual: Tensor | None, norm: Norm) -> Config:
    """What the table has for this norm and these rows, else what the rule gives."""
    n, rows = number(x.shape[-1]), x.numel() // number(x.shape[-1])
    itemsize = common_dtype(x, residual).itemsize
    rule = forward_config(n, itemsize, residual is not None, norm.dropout, rows)
    kernel = "layer_norm" if residual is None else "add_rms_norm"
    kernel = kernel if norm.dropout is None else "dropout_add_layer_norm"
    return tuned(kernel, rows, n, itemsize, rule)


def forward_config(
    n: int, itemsize: int, residual: bool, dropout: Dropout | None, rows=FEW
) -> Config:
    """Longer rows are walked through, sooner without a residual, or with dropout: rows of 64 KB
    spill (H200, bf16). Few rows are a chain of latencies: weight and bias are read beside x
    (192x5120: 5.4 us for 5.7, H200).
    """
    block = max(4, triton.next_power_of_2(n))
    if n * itemsize > (MAX_HELD if residual and dropout is None else SHORT):
        return Config(8192, 1, 16)
    if not dynamic(rows) and rows < FEW and dropout is None:
        return Config(block, 1, min(16, max(4, block // 1024)), early=True)
    return Config(block, max(1, 2048 // block), 4 if block <= 8192 else 8 if block <= 16384 else 32)


# Bytes: x once (and residual), y once (and h), 4 or 8 a row where saved. Dropout moves none.
@triton.jit
def norm_kernel(
    X, SEED, R, W, B, Y, H, MEAN, RSTD, rows, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    top, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    lane = tl.arange(0, BLOCK)
    col = lane[None, :]
    if EARLY and W is not None:
        w = row_vector(W, lane, N)
    if EARLY and B is not None:
        b = row_vector(B, lane, N)
    if SEED is not None and STAGES > 0:
        seed = tl.load(SEED)
    for i in tl.range(0, 1 if STAGES == 0 else tl.cdiv(rows - top, step), num_stages=STAGES):
        row = (top + i * step + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & (col < N)
        h = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
        if R is not None:
            r = tl.load(R + row * RESIDUAL_STRIDE + col, keep, 0.0).to(tl.float32)
        if SEED is not None:
            if STAGES == 0:
                # x and the residual are asked for before the generator runs; ptxas would wait
                tl.debug_barrier()
                seed = tl.load(SEED)
            h *= dropout_factors(
                seed, row * ((N + 3) // 4) + tl.arange(0, BLOCK // 4)[None, :], THRESHOLD, SCALE
            )
        if R is not None:
            h += r
            if H is not None:
                tl.store(H + row * N + col, h, keep)
        if CENTRED:
            mean = tl.sum(h, 1, keep_dims=True) / N
            h = tl.where(col < N, h - mean, 0.0)
            if MEAN is not None:
                tl.store(MEAN + row, mean, row < rows)
        rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
        y = h * rstd
        if EARLY:
            if W is not None:
                y *= w.to(tl.float32) + tl.cast(offset, tl.float32)
            if B is not None:
                y += b.to(tl.float32)
        elif STAGES == 0 or rows > 0:
            # What stands in a branch is not read ahead: only x and the residual are
            if W is not None:
                y *= row_vector(W, lane, N).to(tl.float32) + tl.cast(offset, tl.float32)
            if B is not None:
                y += row_vector(B, lane, N).to(tl.float32)
        tl.store(Y + row * N + col, y, keep)
        if RSTD is not None:
            tl.store(RSTD + row, rstd, row < rows)


# Bytes: as above; the second reading of a row comes from L2, weight and bias from L1 as far as they
# stay there.
@triton.jit
def norm_long_kernel(
    X, SEED, R, W, B, Y, H, MEAN, RSTD, rows, offset, eps,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, N: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    means = tl.zeros([BLOCK], tl.float32)  # Welford's running mean and sum of squares, one a lane
    squares = tl.zeros([BLOCK], tl.float32)
    if SEED is not None:
        seed = tl.load(SEED)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        h = tl.load(X + row * STRIDE + start + lane, keep, 0.0).to(tl.float32)
        if SEED is not None:
            quad = row * ((N + 3) // 4) + start // 4 + tl.arange(0, BLOCK // 4)
            h *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        if R is not None:
            h += tl.load(R + row * RESIDUAL_STRIDE + start + lane, keep, 0.0).to(tl.float32)
            if H is not None:
                tl.store(H + row * N + start + lane, h, keep)
        if CENTRED:
            delta = h - means
            means = tl.where(keep, means + delta * (1.0 / (start // BLOCK + 1)), means)
            squares += tl.where(keep, delta * (h - means), 0.0)
        else:
            squares += h * h
    mean = 0.0
    if CENTRED:
        counts = (N - lane + BLOCK - 1) // BLOCK
        mean = tl.sum(means * counts) / N
        squares += counts * (means - mean) * (means - mean)
        if MEAN is not None:
            tl.store(MEAN + row, mean)
    rstd = tl.rsqrt(tl.sum(squares) / N + tl.cast(eps, tl.float32))
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        h = tl.load(X + row * STRIDE + start + lane, keep, 0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        if SEED is not None:
            quad = row * ((N + 3) // 4) + start // 4 + tl.arange(0, BLOCK // 4)
            h *= dropout_factors(seed, quad, THRESHOLD, SCALE)
        if R is not None:
            r = tl.load(
                R + row * RESIDUAL_STRIDE + start + lane, keep, 0.0, eviction_policy="evict_first"
            )
            h += r.to(tl.float32)
        y = (h - mean) * rstd
        if W is not None:
            w = tl.load(W + start + lane, keep, 0.0, eviction_policy="evict_last").to(tl.float32)
            y *= w + tl.cast(offset, tl.float32)
        if B is not None:
            y += tl.load(B + start + lane, keep, 0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(Y + row * N + start + lane, y, keep)
    if RSTD is not None:
        tl.store(RSTD + row, rstd)
