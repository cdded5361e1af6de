"""Layer normalisation over the last dimension: (x - mean) / sqrt(var + eps) · weight + bias.

x is `[..., n]` in fp32, bf16 or fp16, its rows up to 131072 long; weight and bias `[n]` may be missing. Sums are taken
in fp32. Source: Ba et al. 2016, torch.nn.functional.layer_norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend import Pattern, Reject
from fusion_backend.kernels import launch
from fusion_backend.kernels.inputs import as_rows, dynamic, reject_dtypes, reject_dynamic

MAX_ROW = 131072  # the longest row accepted
MAX_HELD_FORWARD = 65536  # bytes of the longest row that stays in the registers of one program
MAX_HELD_BACKWARD = 8192  # elements of a row whose x, dy, weight and two partial sums do


@Pattern(inductor="reduction")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def affine(y, weight, bias):
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@layer_norm.spelling
def _(x, weight, bias, eps):
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
    return affine(y, weight, bias)


@layer_norm.near_miss
def _(x, weight, bias, eps):
    """the unbiased variance"""
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + eps)
    return affine(y, weight, bias)


@layer_norm.near_miss
def _(x, weight, bias, eps):
    """eps outside the root"""
    y = (x - x.mean(-1, keepdim=True)) / (torch.sqrt(x.var(-1, unbiased=False, keepdim=True)) + eps)
    return affine(y, weight, bias)


@layer_norm.guard
def _(x, weight, bias, eps):
    n = x.shape[-1]
    if dynamic(n):
        return Reject("the row length is dynamic")
    if not 1 <= n <= MAX_ROW:
        return Reject(f"a row of {n} is not between 1 and {MAX_ROW}")
    for name, t in dict(weight=weight, bias=bias).items():
        if t is not None and (t.dim() != 1 or dynamic(t.stride(0)) or t.stride(0) != 1):
            return Reject(f"{name} with shape {tuple(t.shape)} and strides {t.stride()} is not a plain vector")
    if dynamic(x.stride(-1)) or x.stride(-1) != 1:
        return Reject(f"the elements of a row are {x.stride(-1)} apart")
    return reject_dtypes(x=x, weight=weight, bias=bias) or reject_dynamic(eps=eps)


@layer_norm.kernel(saves=("mean", "rstd"))
def _(x, weight, bias, eps, save):
    return forward(x, weight, bias, eps, save, *forward_config(x.shape[-1], x.element_size()))


@layer_norm.saved
def _(x, weight, bias, eps):
    x = x.reshape(-1, x.shape[-1]).float()
    mean = x.mean(1)
    return mean, torch.rsqrt((x - mean[:, None]).pow(2).mean(1) + eps)


@layer_norm.backward
def _(saved, dy):
    needs = tuple(getattr(saved, name) is not None and saved.needs[name] for name in ("x", "weight", "bias"))
    run = backward if saved.x.shape[-1] <= MAX_HELD_BACKWARD else backward_long
    dx, sums = run(dy, saved.x, saved.weight, saved.mean, saved.rstd, needs)
    return dx, *add_up(sums, saved.x.dtype, *needs[1:])


def forward_config(n: int, itemsize: int) -> tuple[int, int, int]:
    """BLOCK, rows a program and warps: 16 elements a thread, but at least four warps."""
    block = triton.next_power_of_2(n)
    if n * itemsize > MAX_HELD_FORWARD:
        return 8192, 1, 16
    return block, max(1, 2048 // block), min(32, max(4, block // 512))


def backward_config(n: int) -> tuple[int, int, int, int, int]:
    """BLOCK, rows at a time, warps, programs a multiprocessor, and stages of the loop over rows."""
    block = triton.next_power_of_2(n)
    warps = max(4, block // 512 if block < 8192 else block // 256)
    return block, max(1, 2048 // block), warps, max(1, 16 // warps), 2


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def forward(x, weight, bias, eps, save, block, rows_each, warps):
    """Normalise `x [..., n]`. Grid: rows / rows_each."""
    n, y = x.shape[-1], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, stride = as_rows(x)
    mean, rstd = (torch.empty(rows if save else 0, dtype=torch.float32, device=x.device) for _ in range(2))
    kernel = layer_norm_kernel if block >= n else layer_norm_long_kernel
    rest = dict(ROWS=rows_each) if block >= n else {}
    launch(
        kernel, ((rows + rows_each - 1) // rows_each,), x, weight, bias, y, mean if save else None,
        rstd if save else None, rows, eps, STRIDE=stride, N=n, BLOCK=block, num_warps=warps, **rest,
    )  # fmt: skip
    return y, mean, rstd


# Bytes: x once, y once, 8 a row where saved.
@triton.jit
def layer_norm_kernel(
    X, W, B, Y, MEAN, RSTD, rows, eps, STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows) & (col < N)
    x = tl.load(X + row * STRIDE + col, keep, 0.0).to(tl.float32)
    mean = tl.sum(x, 1, keep_dims=True) / N
    x = tl.where(col < N, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / N + tl.cast(eps, tl.float32))
    y = x * rstd
    if W is not None:
        y *= tl.load(W + col, col < N).to(tl.float32)
    if B is not None:
        y += tl.load(B + col, col < N).to(tl.float32)
    tl.store(Y + row * N + col, y, keep)
    if MEAN is not None:
        tl.store(MEAN + row, mean, row < rows)
        tl.store(RSTD + row, rstd, row < rows)


# Bytes: as above; the second reading of a row comes from L2.
@triton.jit
def layer_norm_long_kernel(
    X, W, B, Y, MEAN, RSTD, rows, eps, STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * STRIDE
    Y += row * N
    lane = tl.arange(0, BLOCK)
    means = tl.zeros([BLOCK], tl.float32)  # Welford's running mean and sum of squares, one a lane
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        x = tl.load(X + start + lane, keep, 0.0).to(tl.float32)
        delta = x - means
        means = tl.where(keep, means + delta / (start // BLOCK + 1), means)
        squares += tl.where(keep, delta * (x - means), 0.0)
    counts = (N - lane + BLOCK - 1) // BLOCK
    mean = tl.sum(means * counts) / N
    means -= mean
    rstd = tl.rsqrt(tl.sum(squares + counts * means * means) / N + tl.cast(eps, tl.float32))
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        y = (tl.load(X + start + lane, keep).to(tl.float32) - mean) * rstd
        if W is not None:
            y *= tl.load(W + start + lane, keep).to(tl.float32)
        if B is not None:
            y += tl.load(B + start + lane, keep).to(tl.float32)
        tl.store(Y + start + lane, y, keep)
    if MEAN is not None:
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)


def gradients(x, needs, programs):
    """Empty dx, and fp32 partial sums `[weight and bias, programs, n]`; None where nobody asks."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    count = sum(needs[1:])
    shape = (count, programs, x.shape[-1])
    return dx, torch.empty(shape, dtype=torch.float32, device=x.device) if count else None


def backward(dy, x, weight, mean, rstd, needs, config=None):
    """Each program walks through rows with its partial sums in registers. Grid: a few programs a multiprocessor."""
    n = x.shape[-1]
    block, rows_each, warps, programs, stages = config or backward_config(n)
    programs *= multiprocessors(x.device)
    (dy, _, dy_stride), (x, rows, x_stride) = as_rows(dy), as_rows(x)
    if not dynamic(rows):
        programs = min(programs, (rows + rows_each - 1) // rows_each)
    dx, sums = gradients(x, needs, programs)
    launch(
        layer_norm_backward_kernel, (programs,), dy, x, weight, mean, rstd, dx, sums, rows, DY_STRIDE=dy_stride,
        X_STRIDE=x_stride, N=n, WEIGHT=needs[1], BIAS=needs[2], BLOCK=block, ROWS=rows_each, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return dx, sums


# Bytes: dy and x once, dx once, 8 a program and column.
@triton.jit
def layer_norm_backward_kernel(
    DY, X, W, MEAN, RSTD, DX, SUMS, rows, DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32)
    for top in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (top + tl.arange(0, ROWS))[:, None].to(tl.int64)
        keep = (row < rows) & inside
        dy = tl.load(DY + row * DY_STRIDE + col, keep, 0.0).to(tl.float32)
        x = tl.load(X + row * X_STRIDE + col, keep, 0.0).to(tl.float32)
        mean = tl.load(MEAN + row, row < rows, 0.0)
        rstd = tl.load(RSTD + row, row < rows, 0.0)
        x = tl.where(inside, (x - mean) * rstd, 0.0)
        if WEIGHT:
            dw += dy * x
        if BIAS:
            db += dy
        if DX is not None:
            if W is not None:
                dy *= w
            dx = (dy - x * (tl.sum(dy * x, 1, keep_dims=True) / N) - tl.sum(dy, 1, keep_dims=True) / N) * rstd
            tl.store(DX + row * N + col, dx, keep)
    at = tl.program_id(0) * N + col
    if WEIGHT:
        tl.store(SUMS + at, tl.sum(dw, 0, keep_dims=True), inside)
        at += tl.num_programs(0) * N
    if BIAS:
        tl.store(SUMS + at, tl.sum(db, 0, keep_dims=True), inside)


def backward_long(dy, x, weight, mean, rstd, needs, config=(2048, 8, 4, 3)):
    """Two passes: the two means of every row, then dx and partial sums, block of columns by block of columns."""
    n = x.shape[-1]
    cols, warps, programs, stages = config
    blocks = (n + cols - 1) // cols
    programs = max(1, multiprocessors(x.device) * programs // blocks)
    (dy, _, dy_stride), (x, rows, x_stride) = as_rows(dy), as_rows(x)
    if not dynamic(rows):
        programs = min(programs, rows)
    dx, sums = gradients(x, needs, programs)
    means = torch.empty((2, rows), dtype=torch.float32, device=x.device) if needs[0] else None
    args, strides = (dy, x, weight, mean, rstd, means), dict(DY_STRIDE=dy_stride, X_STRIDE=x_stride)
    if needs[0]:
        launch(layer_norm_backward_means_kernel, (rows,), *args, rows, **strides, N=n, BLOCK=4096, num_warps=8)
    launch(
        layer_norm_backward_columns_kernel, (blocks, programs), *args, dx, sums, rows, **strides, N=n,
        WEIGHT=needs[1], BIAS=needs[2], COLS=cols, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, sums


# Bytes: dy and x once.
@triton.jit
def layer_norm_backward_means_kernel(
    DY, X, W, MEAN, RSTD, MEANS, rows, DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    DY += row * DY_STRIDE
    X += row * X_STRIDE
    mean = tl.load(MEAN + row)
    rstd = tl.load(RSTD + row)
    lane = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        keep = start + lane < N
        dy = tl.load(DY + start + lane, keep, 0.0).to(tl.float32)
        if W is not None:
            dy *= tl.load(W + start + lane, keep, 0.0).to(tl.float32)
        products += dy * (tl.load(X + start + lane, keep, 0.0).to(tl.float32) - mean)
        sums += dy
    tl.store(MEANS + row, tl.sum(products) * rstd / N)
    tl.store(MEANS + rows + row, tl.sum(sums) / N)


# Bytes: dy and x once more, dx once, 8 a program and column.
@triton.jit
def layer_norm_backward_columns_kernel(
    DY, X, W, MEAN, RSTD, MEANS, DX, SUMS, rows, DY_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, N: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    if W is not None:
        w = tl.load(W + col, inside, 0.0).to(tl.float32)
    for i in tl.range(tl.program_id(1), rows, tl.num_programs(1), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        dy = tl.load(DY + row * DY_STRIDE + col, inside, 0.0).to(tl.float32)
        x = tl.load(X + row * X_STRIDE + col, inside, 0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        x = (x - tl.load(MEAN + row)) * rstd
        if WEIGHT:
            dw += dy * x
        if BIAS:
            db += dy
        if DX is not None:
            if W is not None:
                dy *= w
            dx = (dy - x * tl.load(MEANS + row) - tl.load(MEANS + rows + row)) * rstd
            tl.store(DX + row * N + col, dx, inside)
    at = tl.program_id(1) * N + col
    if WEIGHT:
        tl.store(SUMS + at, dw, inside)
        at += tl.num_programs(1) * N
    if BIAS:
        tl.store(SUMS + at, db, inside)


def add_up(sums, dtype, weight, bias):
    """Partial sums of all programs to the gradients. Without atomics: the same bits every time."""
    if not weight and not bias:
        return None, None
    _, programs, n = sums.shape
    dw, db = (torch.empty(n, dtype=dtype, device=sums.device) if need else None for need in (weight, bias))
    launch(layer_norm_sums_kernel, ((n + 31) // 32,), sums, dw, db, programs, N=n, COLS=32, ROWS=64, num_warps=4)
    return dw, db


# Bytes: 4 a program and column, for each of the two.
@triton.jit
def layer_norm_sums_kernel(SUMS, DW, DB, programs, N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    col = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    inside = col < N
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for top in tl.range(0, programs, ROWS):
        row = top + tl.arange(0, ROWS)[:, None]
        at, keep = SUMS + row * N + col, (row < programs) & inside
        if DW is not None:
            dw += tl.load(at, keep, 0.0)
            at += programs * N
        if DB is not None:
            db += tl.load(at, keep, 0.0)
    if DW is not None:
        tl.store(DW + col, tl.sum(dw, 0, keep_dims=True), inside)
    if DB is not None:
        tl.store(DB + col, tl.sum(db, 0, keep_dims=True), inside)


@layer_norm.inputs(dict(rows=7, n=100), dict(rows=16384, n=4096))
def _(tensor, rows, n):
    return tensor(rows, n), tensor(n), tensor(n), 1e-5
