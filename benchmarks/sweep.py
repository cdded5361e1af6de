"""Time the configurations of a kernel directly, to choose the ones its launcher picks.

    python -m benchmarks.sweep NAME ... [--out FILE.json]

Prints the fastest of each piece of work. Needs a GPU; without one, TRITON_INTERPRET=1 runs the
kernels in Triton's interpreter on tiny sizes, which shows no more than that they run. For BLOCK and
warps alone, beside eager and Inductor, see benchmarks.block_size.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from fusion_backend.patterns import (
    add_mul_exp,
    dropout_add,
    quantize_int8,
)

from benchmarks.results import Run, machine
from benchmarks.sweep_attention import attention, attention_dropout, attention_wide
from benchmarks.timing import Clock
from fusion_backend.kernels.common.blocks import blocks_of
from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.launch import interpreting, trial
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.gemm import gated_linear
from fusion_backend.kernels.loss import cross_entropy
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.kernels.norm import backward_short, channels, l2_norm
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.norm import forward_cooperative as norms_shared
from fusion_backend.kernels.norm import forward_split as norms_split
from fusion_backend.kernels.norm import group_norm as groups
from fusion_backend.kernels.norm import group_norm_backward as groups_backward
from fusion_backend.kernels.norm.backward import MAX_HELD_BACKWARD
from fusion_backend.kernels.norm.backward_cooperative import backward_cooperative
from fusion_backend.kernels.norm.backward_few import backward_few
from fusion_backend.kernels.norm.backward_long import backward_long
from fusion_backend.kernels.norm.operands import Backward, Forward
from fusion_backend.kernels.quantize import quantize
from fusion_backend.kernels.softmax import backward as softmax_backward
from fusion_backend.kernels.softmax import forward as softmax

NO_GPU = "kernels need a GPU, or TRITON_INTERPRET=1 (set before Python starts) to be tried in Triton's interpreter"
INTERPRETED = "CPU: the kernels run in Triton's interpreter; their times mean nothing"
Call = tuple[str, str, Callable[[], object]]  # the work, the configuration in words, a call


def run_now(kernel, grid, args, options) -> None:
    """Launch without torch's wrapper, which costs a millisecond a call outside compiled code."""
    kernel[grid](*args, **options)


def said(c: Config) -> str:
    """block=4096 rows=1 ...: what benchmarks.tune reads."""
    return " ".join(f"{k}={int(v)}" for k, v in c._asdict().items() if v)


def elementwise(device) -> Iterator[Call]:
    size = 50_000_000 if torch.cuda.is_available() else 5000
    x, y = (torch.randn(size, device=device) for _ in range(2))
    out = torch.empty_like(x)
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8)):
        (grid, last), rest = blocks_of(size, block), dict(BLOCK=block, num_warps=warps)
        run = functools.partial(
            run_now, add_mul_exp.add_mul_exp_kernel, grid, (x, y, out, last, 0.5), rest
        )
        yield f"add_mul_exp f32 {size}", f"BLOCK={block} warps={warps}", run


def integers(device) -> Iterator[Call]:
    """4 to 16 elements a thread: 16 bytes of x, or 16 bytes of the result, and between."""
    big = torch.cuda.is_available()
    for kind, size in (
        (torch.bfloat16, 64_000_000),
        (torch.float32, 10_000_000),
        (torch.float32, 50_000_000),
    ):
        size = size if big else 5000
        x = torch.randn(size, device=device).to(kind)
        for each, warps in itertools.product((4, 8, 16), (4, 8)):
            run = functools.partial(quantize_int8.forward, x, 0.05, 3.0, (each * 32 * warps, warps))
            yield (
                f"quantize_int8 {str(kind)[6:]} {size}",
                f"BLOCK={each * 32 * warps} warps={warps}",
                run,
            )


def read_ahead(configs: list[tuple]) -> list[tuple]:
    """The same with a few programs a multiprocessor and loops over rows, as far as there is shared
    memory (of bf16).

    One program of 32 warps fills a multiprocessor: while it computes, nothing is read, but for the
    next row here.
    """
    ahead = [
        (*c, max(1, 32 // c[2] * more // 2), stages)
        for c in configs
        for more in (1, 2)
        for stages in (2, 3)
    ]
    return [c for c in dict.fromkeys(ahead) if c[0] * c[1] * 2 * (c[4] - 1) * c[3] <= 220 << 10]


def normalisations(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    shapes = (
        (16384, 4096),
        (8192, 8192),
        (2048, 32768),
        (64, 131072),
        (32768, 1024),
        (192, 5120),
        (16, 8192),
    )
    for rows, n in shapes if big else ((64, 256),):
        x, w, b, dy = (
            torch.randn(s, device=device, dtype=torch.bfloat16)
            for s in ((rows, n), n, n, (rows, n))
        )
        block = triton.next_power_of_2(n)
        forward = [(block, each, warps) for each in (1, 2, 4) for warps in (4, 8, 16, 32)]
        forward = [c for c in forward if 8 <= c[0] * c[1] // (32 * c[2]) <= 64]
        # With few rows a call is a chain of latencies: read before the sums, weight and bias add
        # none to it. A long row reads them from L2 each time, 128 KB beside its own 64: by way of
        # shared memory it leaves L1 to them.
        held = [c for c in forward if c[0] >= n]
        ahead = read_ahead(held) * (rows > 1024)
        forward += (
            [(*c, 0, 0, True) for c in held] + ahead + [(*c, True) for c in ahead if n <= 8192]
        )
        forward += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16, 32) if part < n]
        norm = norms.Norm(w, b, None, 1e-5, True)
        for c in (Config(*c) for c in forward):
            run = functools.partial(norms.forward, x, None, norm, True, c)
            yield f"layer_norm {rows}x{n}", said(c), run
        y, moments = torch.empty_like(x), torch.empty(2, rows, device=device)
        whole = dict(STRIDE=n, RESIDUAL_STRIDE=0, N=n, CENTRED=True, THRESHOLD=0, SCALE=1.0)
        wide = itertools.product((2048, 4096), [1], (2, 4), (7, 10, 12, 14, 16), [3])
        for c in itertools.starmap(Config, wide):
            if (
                c.block // c.warps == 1024
                and 20 <= c.warps * c.programs <= 32
                and n > 8192
                and shareable(x, c)
            ):
                operands = Forward(x, None, None, w, b, y, None, *moments, rows, 0.0, 1e-5)
                yield (
                    f"layer_norm shared {rows}x{n}",
                    said(c),
                    functools.partial(norms_shared.forward, operands, c, **whole),
                )
        _, _, mean, rstd = norms.forward(x, None, norm, True)
        needs = (True, True, True)
        args = dy, None, x, mean, rstd, norm, needs, torch.empty_like(x), None
        yield from norm_backwards("layer_norm", args, rows, n)


def norm_backwards(name: str, args: tuple, rows: int, n: int) -> Iterator[Call]:
    """Of the kernel that the launcher takes for rows of this length."""
    block, short = triton.next_power_of_2(n), n <= MAX_HELD_BACKWARD
    if short:
        configs = itertools.product([block], (1, 2), (4, 8, 16, 32), (1, 2, 4), (1, 2, 3))
    else:
        configs = itertools.product((1024, 2048, 4096), [1], (4, 8), (4, 8), (1, 3, 4))
    for c in itertools.starmap(Config, configs):
        each = c.block * c.rows // (32 * c.warps)  # elements a thread
        if short and 8 <= each <= 32 and 16 <= c.warps * c.programs <= 32:
            run = functools.partial(backward_short.backward_short, Backward(*args), c)
            yield f"{name} backward {rows}x{n}", said(c), run
        if not short and each == 8:
            run = functools.partial(backward_long, Backward(*args), c)
            yield f"{name} backward by columns {rows}x{n}", said(c), run
    wide = (
        itertools.product((512, 1024, 2048, 4096), [1], (1, 2, 4, 8), (2, 4, 7, 8, 16), (3, 4))
        if not short
        else ()
    )
    for c in itertools.starmap(Config, wide):
        if c.block == 512 * c.warps and c.warps * c.programs in (14, 16) and shareable(args[2], c):
            run = functools.partial(backward_cooperative, Backward(*args), c)
            yield f"{name} backward shared {rows}x{n}", said(c), run


def few_rows(device) -> Iterator[Call]:
    """Norms with a residual, and the backward of few rows, in one kernel and in two."""
    big = torch.cuda.is_available()
    for rows, n in ((192, 5120), (16, 8192), (256, 4096), (256, 8192)) if big else ((20, 256),):
        x, r, w, dy = (
            torch.randn(s, device=device, dtype=torch.bfloat16)
            for s in ((rows, n), (rows, n), n, (rows, n))
        )
        block = triton.next_power_of_2(n)
        norm = norms.Norm(w, None, None, 1e-6, False)
        for warps, early in itertools.product((4, 8, 16, 32), (False, True)):
            c = Config(block, 1, warps, early=early)
            if 8 <= block // (32 * warps) <= 64:
                yield (
                    f"add_rms_norm {rows}x{n}",
                    said(c),
                    functools.partial(norms.forward, x, r, norm, True, c),
                )
        _, h, mean, rstd = norms.forward(x, r, norm, True)
        args = dy, dy, h, mean, rstd, norm, (True, True, False), None
        words = f"add_rms_norm backward, whole {rows}x{n}"
        rule = backward_short.backward_config(n)
        yield words, "two kernels", functools.partial(norms_backward.backward, *args, rule)
        for warps in (4, 8, 16, 32):
            if 8 <= block // (32 * warps) <= 64:
                operands = Backward(*args[:7], torch.empty_like(h), None)
                run = functools.partial(backward_few, operands, warps)
                yield words, f"one kernel, warps={warps}", run
    rows, n = (64, 131072) if big else (2, 70000)
    x, y, w = (
        torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((rows, n), (rows, n), n)
    )
    mean, rstd = torch.empty(2, rows, device=device)
    whole = dict(STRIDE=n, RESIDUAL_STRIDE=0, N=n, CENTRED=True, THRESHOLD=0, SCALE=1.0)
    for piece, warps in ((4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16)):
        operands = Forward(x, None, None, w, w, y, None, mean, rstd, rows, 0.0, 1e-5)
        yield (
            f"layer_norm split {rows}x{n}",
            f"BLOCK={piece} warps={warps}",
            functools.partial(norms_split.forward, operands, (piece, warps), **whole),
        )


def dropouts(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    for rows, n in (
        ((16384, 4096), (8192, 8192), (2048, 32768), (4096, 768)) if big else ((64, 256),)
    ):
        x, r, w, b = (
            torch.randn(s, device=device, dtype=torch.bfloat16)
            for s in ((rows, n), (rows, n), n, n)
        )
        seed, block = torch.randint(2**62, (1,), device=device), triton.next_power_of_2(n)
        for part, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)):
            words = f"BLOCK={part} warps={warps}"
            yield (
                f"dropout_add {rows}x{n}",
                words,
                functools.partial(dropout_add.run, x, r, 0.1, seed, part, warps),
            )
            run = functools.partial(dropout_add.run, x, None, 0.1, seed, part, warps)
            yield f"dropout_add backward {rows}x{n}", words, run
        norm = norms.Norm(w, b, None, 1e-5, True, Dropout(seed, 0.1))
        configs = [(block, each, warps) for each in (1, 2, 4) for warps in (4, 8, 16, 32)]
        configs = [c for c in configs if 8 <= c[0] * c[1] // (32 * c[2]) <= 64]
        # two tensors
        ahead = [c for c in read_ahead(configs) if c[0] * c[1] * 4 * (c[4] - 1) * c[3] <= 220 << 10]
        configs += ahead + [(*c, True) for c in ahead]
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        for c in (Config(*c) for c in configs):
            run = functools.partial(norms.forward, x, r, norm, True, c)
            words = said(c)
            yield f"dropout_add_layer_norm {rows}x{n}", words, run
        y, h, mean, rstd = norms.forward(x, r, norm, True)
        args = (
            y,
            r,
            h,
            mean,
            rstd,
            norm,
            (True, True, True),
            torch.empty_like(x),
            torch.empty_like(x),
        )
        yield from norm_backwards("dropout_add_layer_norm", args, rows, n)


def gated(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    for m, k, n in (
        ((16384, 1024, 4096), (16384, 512, 2048), (8192, 4096, 14336)) if big else ((64, 64, 64),)
    ):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w1, w2 = (
            torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5 for _ in range(2)
        )
        b = torch.randn(n, device=device, dtype=torch.bfloat16)
        tiles = ((128, 128, 8), (128, 64, 4), (64, 128, 4), (256, 64, 8))
        for (bm, bn, warps), stages, group in itertools.product(tiles, (3, 4), (8, 16)):
            if group != 8 and bm * bn < 128 * 128:
                continue
            config = dict(BM=bm, BN=bn, BK=64, GROUP=group, num_warps=warps, num_stages=stages)
            words = " ".join(f"{key}={value}" for key, value in config.items())
            for layout, a1, a2 in (
                ("linear", w1.t(), w2.t()),
                ("plain", w1.view(k, n), w2.view(k, n)),
            ):
                run = functools.partial(gated_linear.forward, x, a1, b, a2, b, False, config)
                yield f"gated_linear {layout} m={m} k={k} n={n}", words, run


def softmaxes(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    shapes = (16384, 4096), (8192, 8192), (2048, 32768), (192, 5120), (16, 8192)
    for rows, n in shapes if big else ((64, 256),):
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        block = triton.next_power_of_2(n)
        configs = [(block, each, warps) for each in (1, 2, 4) for warps in (4, 8, 16, 32)]
        configs = [c for c in configs if 8 <= c[0] * c[1] // (32 * c[2]) <= 64]
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        ahead = read_ahead([c for c in configs if c[0] >= n]) * (rows > 1024)
        for c in (Config(*c) for c in configs + ahead):
            run = functools.partial(softmax.forward, x, None, None, None, None, c)
            yield f"softmax {rows}x{n}", said(c), run
        wide = itertools.product((1024, 2048, 4096), [1], (1, 2, 4), (4, 8, 12, 16, 24), (3, 4))
        for c in itertools.starmap(Config, wide):
            if n > softmax.HELD and c.warps * c.programs in (24, 32) and shareable(x, c):
                yield (
                    f"softmax shared {rows}x{n}",
                    said(c),
                    functools.partial(softmax.forward_cooperative, x, None, c),
                )
        y, dy = torch.softmax(x, -1), torch.randn_like(x)
        configs += [
            (part, 1, warps) for part in (4096, 8192, 16384) for warps in (16, 32) if part < n
        ]
        for c in dict.fromkeys(configs):
            run = functools.partial(
                softmax_backward.backward, dy, y, x, None, None, (True, False), Config(*c)
            )
            yield f"softmax backward {rows}x{n}", f"BLOCK={c[0]} rows={c[1]} warps={c[2]}", run


def quantisations(device) -> Iterator[Call]:
    rows, n = (8192, 4096) if torch.cuda.is_available() else (64, 256)
    x, block = torch.randn(rows, n, device=device, dtype=torch.bfloat16), triton.next_power_of_2(n)
    w = torch.randn(n, device=device, dtype=torch.bfloat16)
    for each, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        if 16 <= block * each // (32 * warps) <= 128:
            words = f"rows={each} warps={warps}"
            run = functools.partial(
                quantize.forward, x, None, None, None, 1e-5, (block, each, warps)
            )
            yield f"quantize_per_token {rows}x{n}", words, run
            run = functools.partial(quantize.forward, x, w, None, 1e-6, 1e-5, (block, each, warps))
            yield f"rms_norm_quantize {rows}x{n}", words, run
    # walks through the row; its second reading is in L1
    for part, warps in itertools.product((1024, 2048), (4, 8)):
        if part < n and part // (32 * warps) >= 8:
            run = functools.partial(quantize.forward, x, None, None, None, 1e-5, (part, 1, warps))
            yield f"quantize_per_token {rows}x{n}", f"BLOCK={part} warps={warps}", run


def losses(device) -> Iterator[Call]:
    rows, v = (8192, 128256) if torch.cuda.is_available() else (16, 1000)
    x, target = (
        torch.randn(rows, v, device=device, dtype=torch.bfloat16),
        torch.randint(v, (rows,), device=device),
    )
    scale = torch.ones((), device=device)
    for warps, each in itertools.product((2, 4, 8), (1, 2, 4, 8)):
        block = min(256 * warps, triton.next_power_of_2(v))
        run = functools.partial(cross_entropy.forward, x, target, -100, 0.0, (block, each, warps))
        yield f"cross_entropy {rows}x{v}", f"BLOCK={block} each={each} warps={warps}", run
    for block, warps, stages in itertools.product((2048, 8192, 16384), (4, 8, 16, 32), (1, 2)):
        if 8 <= block // (32 * warps) <= 32:
            words = f"BLOCK={block} warps={warps} stages={stages}"
            # as linear_cross_entropy does; last, for it changes x
            part = x[: rows // 4], target[: rows // 4]
            run = functools.partial(
                cross_entropy.gradient_in_place, *part, scale, -100, 0.0, (block, warps, stages)
            )
            yield f"cross_entropy in place {rows // 4}x{v}", words, run


def l2_norms(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    for rows, n in (
        ((65536, 1024), (16384, 4096), (8192, 8192), (2048, 32768)) if big else ((64, 256),)
    ):
        x, dy = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        block = triton.next_power_of_2(n)
        configs = [(block, each, warps) for each in (1, 2, 4) for warps in (4, 8, 16, 32)]
        configs = [c for c in configs if 8 <= c[0] * c[1] // (32 * c[2]) <= 64]
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        for c in configs:
            words = f"BLOCK={c[0]} rows={c[1]} warps={c[2]}"
            yield f"l2_norm {rows}x{n}", words, functools.partial(l2_norm.forward, x, 1e-12, c)
            yield (
                f"l2_norm backward {rows}x{n}",
                words,
                functools.partial(l2_norm.backward, dy, x, 1e-12, c),
            )


def by_channels(device) -> Iterator[Call]:
    """Batch normalisation of planes and channels-last, and a bias along rows."""
    big = torch.cuda.is_available()
    c, b, n = (256, 64, 56) if big else (8, 2, 9)
    vector = torch.rand(4096, device=device, dtype=torch.bfloat16) + 0.5
    affine = channels.Affine(*[vector[:c]] * 4, 1e-5)
    x = torch.randn(b, c, n, n, device=device, dtype=torch.bfloat16)
    small = torch.randn(b * 4, c * 8, n // 8, n // 8, device=device, dtype=torch.bfloat16)
    wide = channels.Affine(*[vector[: c * 8]] * 4, 1e-5)
    rows = torch.randn(16384 if big else 4, 4096, device=device, dtype=torch.bfloat16)
    for block, each, warps in itertools.product(
        (64, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16, 32), (4, 8)
    ):
        how = (block, each, warps)
        if not 8 <= block * each // (32 * warps) <= 32:
            continue
        words = f"BLOCK={block} rows={each} warps={warps}"
        last = x.contiguous(memory_format=torch.channels_last)
        bias = channels.Affine(None, None, None, vector, 0.0)
        for name, args in (
            ("batch_norm", (x, 1, affine, "relu")),
            ("batch_norm of small planes", (small, 1, wide, "relu")),
            ("batch_norm channels-last", (last, 1, affine, "relu")),
            ("bias_act", (rows, 1, bias, "gelu")),
        ):
            yield (
                f"{name} {tuple(args[0].shape)}",
                words,
                functools.partial(channels.forward, *args, how),
            )
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
        if 8 <= block // (32 * warps) <= 32:
            for name, t, its in (
                ("batch_norm", x, affine),
                ("batch_norm of small planes", small, wide),
            ):
                run = functools.partial(channels.forward, t, 1, its, "relu", (block, 0, warps))
                yield f"{name} {tuple(t.shape)}", f"BLOCK={block} in a row, warps={warps}", run


def group_norms(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    for b, c, n in (
        ((16, 480, 64), (64, 320, 32), (64, 1280, 8), (2, 512, 128)) if big else ((2, 64, 8),)
    ):
        x, dy = (torch.randn(b, c, n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        w, bias = (torch.randn(c, device=device, dtype=torch.bfloat16) for _ in range(2))
        _, mean, rstd = groups.forward(x, 32, w, bias, 1e-5, "silu", True)
        args, work = (dy, x, 32, w, bias, mean, rstd, "silu", [True] * 3), f"{b}x{c}x{n}x{n}"
        tiles = itertools.product((4096, 8192, 16384, 32768), (4, 8, 16, 32))
        tiles = [(lanes, 1, warps) for lanes, warps in tiles if 8 <= lanes // (32 * warps) <= 32]
        ahead = [c for c in read_ahead(tiles) if c[4] == 3 and c[2] * c[3] <= 32]
        for c in (Config(*c) for c in tiles + [c for c in ahead if c[2] * c[3] == 32]):
            run = functools.partial(groups.forward, x, 32, w, bias, 1e-5, "silu", False, c, False)
            yield f"group_norm silu {work}", said(c), run
        for c in (Config(*c) for c in tiles[::2] + ahead if c[0] // (32 * c[2]) >= 16):
            run = functools.partial(groups_backward.backward, *args, c, False)
            yield f"group_norm silu backward {work}", said(c), run
        for c in (Config(*c) for c in tiles if groups.few(x, 32)):
            run = functools.partial(groups.forward, x, 32, w, bias, 1e-5, "silu", False, c, True)
            yield f"group_norm silu split {work}", said(c), run
            run = functools.partial(groups_backward.backward, *args, c, True)
            yield f"group_norm silu split backward {work}", said(c), run


SWEEPS = {
    "add_mul_exp": elementwise,
    "quantize_int8": integers,
    "layer_norm": normalisations,
    "dropout_add": dropouts,
    "dropout_add_layer_norm": dropouts,
    "gated_linear": gated,
    "softmax": softmaxes,
    "quantize_per_token": quantisations,
    "rms_norm_quantize": quantisations,
    "cross_entropy": losses,
    "l2_norm": l2_norms,
    "batch_norm": by_channels,
    "bias_act": by_channels,
    "group_norm": group_norms,
    "attention": attention,
    "add_rms_norm": few_rows,
    "attention_wide": attention_wide,
    "attention_dropout": attention_dropout,
}


def timed(
    configs: Iterator[Call], clock: Callable, calls: int
) -> dict[str, list[tuple[float, str]]]:
    """Milliseconds and words of every configuration that runs, by work; one that does not compile
    is named.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    with trial(run_now):
        for work, words, run in configs:
            try:
                run()
            except (
                Exception
            ) as error:  # out of registers or shared memory: worth a line, not the end
                print(
                    f"{work}: {words} fails: {type(error).__name__}: {str(error)[:80]}", flush=True
                )
                continue
            found.setdefault(work, []).append(
                (statistics.median(clock(run) for _ in range(calls)), words)
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"kernels: {', '.join(SWEEPS)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all times as JSON")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(SWEEPS)):
        parser.error(f"no sweep for {', '.join(unknown)}; there is {', '.join(SWEEPS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run("sweep", machine(device, "benchmarks.sweep"))
    if device.type == "cpu":
        if not interpreting():
            parser.error(NO_GPU)
        print(INTERPRETED)
    for configs in dict.fromkeys(SWEEPS[name] for name in args.names):
        for work, times in timed(
            configs(device), Clock(device), 7 if device.type == "cuda" else 1
        ).items():
            print(work)
            for ms, words in sorted(times)[:12]:
                print(f"  {ms:9.4f} ms  {words}", flush=True)
            run.rows += [dict(work=work, config=words, ms=ms) for ms, words in sorted(times)]
            if args.out:
                run.save(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
