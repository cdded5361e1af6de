"""The configurations of modulated_norm, forward and backward, that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton

from benchmarks.configurations.running import Call, read_ahead, row_configs, said
from benchmarks.workloads.listed import TOKENS
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import modulated, modulated_backward

NEEDS = dict(x=True, weight=False, bias=False, scale=True, shift=True)


def modulated_norms(device) -> Iterator[Call]:
    """Layer norm in bf16 without weight and bias. The kernels' own rules come first."""
    for b, t, n in TOKENS if torch.cuda.is_available() else ((2, 9, 64),):
        x, dy = torch.randn(2, b, t, n, device=device, dtype=torch.bfloat16)
        rows = torch.randn(b, 2 * n, device=device, dtype=torch.bfloat16)
        scale, shift = (part[:, None] for part in rows.chunk(2, dim=1))
        how = modulated.Modulation(None, None, scale, shift, 1e-6, True)
        words, held = f"b={b} t={t} n={n}", row_configs(n)
        configs = itertools.starmap(Config, held + read_ahead(held))
        for config in (modulated.forward_config(n), *configs):
            run = functools.partial(modulated.forward, x, how, True, config)
            yield Call(f"modulated_norm {words}", said(config), run)
        _, mean, rstd = modulated.forward(x, how, True)
        block = triton.next_power_of_2(n)
        every = itertools.product([block], (1, 2, 4), (4, 8, 16, 32), (1, 2, 4), (1, 2, 3))
        for config in [modulated_backward.backward_config(n), *itertools.starmap(Config, every)]:
            each = config.block * config.rows // (32 * config.warps)
            if 8 <= each <= 32 and 16 <= config.warps * config.programs <= 32:
                args = dy, x, mean, rstd, how, NEEDS, config
                run = functools.partial(modulated_backward.backward, *args)
                yield Call(f"modulated_norm backward {words}", said(config), run)
