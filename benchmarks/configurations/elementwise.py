"""The configurations of elementwise kernels that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from fusion_backend.patterns import add_mul_exp, quantize_int8

from benchmarks.configurations.running import Call, run_now
from fusion_backend.kernels.common.blocks import blocks_of


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
