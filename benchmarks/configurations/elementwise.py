"""The configurations of elementwise kernels and of gated_linear that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from fusion_backend.patterns import add_mul_exp, quantize_int8

from benchmarks.configurations.running import Call, run_now
from fusion_backend.kernels.common.blocks import blocks_of
from fusion_backend.kernels.gemm import gated_linear


def elementwise(device) -> Iterator[Call]:
    size = 50_000_000 if torch.cuda.is_available() else 5000
    x, y = (torch.randn(size, device=device) for _ in range(2))
    out = torch.empty_like(x)
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8)):
        (grid, last), rest = blocks_of(size, block), dict(BLOCK=block, num_warps=warps)
        run = functools.partial(
            run_now, add_mul_exp.add_mul_exp_kernel, grid, (x, y, out, last, 0.5), rest
        )
        yield Call(f"add_mul_exp f32 {size}", f"BLOCK={block} warps={warps}", run)


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
            yield Call(
                f"quantize_int8 {str(kind)[6:]} {size}",
                f"BLOCK={each * 32 * warps} warps={warps}",
                run,
            )


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
                yield Call(f"gated_linear {layout} m={m} k={k} n={n}", words, run)
