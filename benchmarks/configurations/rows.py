"""The configurations of the other row-wise kernels that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton

from benchmarks.configurations.running import Call, read_ahead, row_configs, said
from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import l2_norm
from fusion_backend.kernels.quantize import quantize
from fusion_backend.kernels.softmax import backward as softmax_backward
from fusion_backend.kernels.softmax import forward as softmax


def softmaxes(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    shapes = (16384, 4096), (8192, 8192), (2048, 32768), (192, 5120), (16, 8192)
    for rows, n in shapes if big else ((64, 256),):
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        configs = row_configs(n)
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        ahead = read_ahead([c for c in configs if c[0] >= n]) * (rows > 1024)
        for c in (Config(*c) for c in configs + ahead):
            run = functools.partial(softmax.forward, x, None, None, None, None, c)
            yield Call(f"softmax {rows}x{n}", said(c), run)
        wide = itertools.product((1024, 2048, 4096), [1], (1, 2, 4), (4, 8, 12, 16, 24), (3, 4))
        for c in itertools.starmap(Config, wide):
            if n > softmax.HELD and c.warps * c.programs in (24, 32) and shareable(x, c):
                yield Call(
                    f"softmax shared {rows}x{n}",
                    said(c),
                    functools.partial(softmax.forward_cooperative, x, None, c),
                )
        y, dy = torch.softmax(x, -1), torch.randn_like(x)
        configs += [
            (part, 1, warps) for part in (4096, 8192, 16384) for warps in (16, 32) if part < n
        ]
        for c in dict.fromkeys(configs):
            args = dy, y, x, None, None, (True, False)
            run = functools.partial(softmax_backward.backward, *args, Config(*c))
            yield Call(
                f"softmax backward {rows}x{n}", f"BLOCK={c[0]} rows={c[1]} warps={c[2]}", run
            )


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
            yield Call(f"quantize_per_token {rows}x{n}", words, run)
            run = functools.partial(quantize.forward, x, w, None, 1e-6, 1e-5, (block, each, warps))
            yield Call(f"rms_norm_quantize {rows}x{n}", words, run)
    # walks through the row; its second reading is in L1
    for part, warps in itertools.product((1024, 2048), (4, 8)):
        if part < n and part // (32 * warps) >= 8:
            run = functools.partial(quantize.forward, x, None, None, None, 1e-5, (part, 1, warps))
            yield Call(f"quantize_per_token {rows}x{n}", f"BLOCK={part} warps={warps}", run)


def l2_norms(device) -> Iterator[Call]:
    big = torch.cuda.is_available()
    for rows, n in (
        ((65536, 1024), (16384, 4096), (8192, 8192), (2048, 32768)) if big else ((64, 256),)
    ):
        x, dy = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        configs = row_configs(n)
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        for c in configs:
            words = f"BLOCK={c[0]} rows={c[1]} warps={c[2]}"
            yield Call(
                f"l2_norm {rows}x{n}", words, functools.partial(l2_norm.forward, x, 1e-12, c)
            )
            yield Call(
                f"l2_norm backward {rows}x{n}",
                words,
                functools.partial(l2_norm.backward, dy, x, 1e-12, c),
            )
