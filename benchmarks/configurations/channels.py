"""The configurations of batch norm, group norm and bias_act that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from benchmarks.configurations.running import Call, read_ahead, said
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import channels
from fusion_backend.kernels.norm import group_norm as groups
from fusion_backend.kernels.norm import group_norm_backward as groups_backward
from fusion_backend.kernels.norm import group_norm_rows as rows
from fusion_backend.kernels.norm import group_norm_rows_backward as rows_backward


def by_channels(device) -> Iterator[Call]:
    """Batch normalisation of planes and channels-last, and a bias along rows."""
    big = torch.cuda.is_available()
    c, b, n = (256, 64, 56) if big else (8, 2, 9)
    vector = torch.rand(4096, device=device, dtype=torch.bfloat16) + 0.5
    affine = channels.Affine(*[vector[:c]] * 4, 1e-5)
    x = torch.randn(b, c, n, n, device=device, dtype=torch.bfloat16)
    small = torch.randn(b * 4, c * 8, n // 8, n // 8, device=device, dtype=torch.bfloat16)
    wide = channels.Affine(*[vector[: c * 8]] * 4, 1e-5)
    many = torch.randn(16384 if big else 4, 4096, device=device, dtype=torch.bfloat16)
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
            ("bias_act", (many, 1, bias, "gelu")),
        ):
            yield Call(
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
                yield Call(
                    f"{name} {tuple(t.shape)}", f"BLOCK={block} in a row, warps={warps}", run
                )


def group_norms_of_rows(device) -> Iterator[Call]:
    """Channels-last, as in diffusion models, in bf16."""
    shapes = (64, 320, 64), (16, 640, 32), (8, 1280, 16), (2, 512, 128), (1, 320, 64)
    for b, c, n in shapes if torch.cuda.is_available() else ((2, 64, 8),):
        x, dy = (
            torch.randn(b, c, n, n, device=device, dtype=torch.bfloat16).to(
                memory_format=torch.channels_last
            )
            for _ in range(2)
        )
        w, bias = (torch.randn(c, device=device, dtype=torch.bfloat16) for _ in range(2))
        _, mean, rstd = rows.forward(x, 32, w, bias, 1e-5, "silu", True)
        args, work = (dy, x, 32, w, bias, mean, rstd, "silu", [True] * 3), f"{b}x{c}x{n}x{n}"
        every = itertools.product((1024, 2048, 4096, 8192), (2, 4, 8, 16), (2, 4, 8, 16))
        for elements, warps, programs in every:
            if not 8 <= elements // (32 * warps) <= 32:
                continue
            words = f"elements={elements} warps={warps} programs={programs}"
            tiles = rows.tiles_of(x, elements, warps, programs)
            run = functools.partial(rows.forward, x, 32, w, bias, 1e-5, "silu", True, tiles)
            yield Call(f"group_norm channels-last {work}", words, run)
            run = functools.partial(rows_backward.backward, *args, tiles)
            yield Call(f"group_norm channels-last backward {work}", words, run)


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
            yield Call(f"group_norm silu {work}", said(c), run)
        for c in (Config(*c) for c in tiles[::2] + ahead if c[0] // (32 * c[2]) >= 16):
            run = functools.partial(groups_backward.backward, *args, c, False)
            yield Call(f"group_norm silu backward {work}", said(c), run)
        for c in (Config(*c) for c in tiles if groups.few(x, 32)):
            run = functools.partial(groups.forward, x, 32, w, bias, 1e-5, "silu", False, c, True)
            yield Call(f"group_norm silu split {work}", said(c), run)
            run = functools.partial(groups_backward.backward, *args, c, True)
            yield Call(f"group_norm silu split backward {work}", said(c), run)
