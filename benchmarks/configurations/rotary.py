"""The configurations of norm_rotary, forward and backward, that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton

from benchmarks.configurations.running import Call, said
from fusion_backend.kernels.norm import norm_rotary, norm_rotary_backward
from fusion_backend.kernels.norm.norm_rotary import Heads

HEADS = ((8, 16, 1024, 128), (8, 8, 1024, 128))  # batch, heads, length, elements: of Qwen3


def tiles(heads: int, d: int) -> list[Heads]:
    """Tiles that give a thread 8 to 32 elements."""
    block = 2 * triton.next_power_of_2(d // 2)
    every = itertools.starmap(Heads, itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (2, 4, 8)))
    return [c for c in every if c.heads <= heads and 8 <= spread(c, block) <= 32]


def spread(c: Heads, block: int) -> int:
    return block * c.heads * c.positions // (32 * c.warps)


def norm_rotaries(device) -> Iterator[Call]:
    """RMS norm and halves in bf16, of heads that stand behind positions in memory, as a projection
    leaves them. The kernels' own rules come first.
    """
    for b, h, n, d in HEADS if torch.cuda.is_available() else ((2, 3, 5, 16),):
        x, dy = torch.randn(2, b, n, h, d, device=device, dtype=torch.bfloat16).transpose(2, 3)
        weight = torch.randn(d, device=device, dtype=torch.bfloat16)
        cos, sin = torch.randn(2, n, d, device=device, dtype=torch.bfloat16)
        how, words = (cos, sin, "half"), f"b={b} h={h} n={n} d={d}"
        for config in (norm_rotary.heads_config(h, d), *tiles(h, d)):
            args = x, weight, 0.0, 1e-6, *how, True, config
            run = functools.partial(norm_rotary.forward, *args)
            yield Call(f"norm_rotary {words}", said(config), run)
        _, rstd = norm_rotary.forward(x, weight, 0.0, 1e-6, *how, True)
        ahead = [
            c._replace(programs=programs, stages=stages)
            for c in tiles(h, d)
            for programs in (1, 2, 4, 8)
            for stages in (1, 2, 3)
            if 16 <= c.warps * programs <= 32
        ]
        for config in (norm_rotary_backward.backward_config(h, d), *ahead):
            args = dy, x, weight, 0.0, *how, rstd, (True, True), config
            run = functools.partial(norm_rotary_backward.backward, *args)
            yield Call(f"norm_rotary backward {words}", said(config), run)
