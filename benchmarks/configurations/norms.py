"""The configurations of the row-wise norms, forward and backward, that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton
from fusion_backend.patterns import dropout_add

from benchmarks.configurations.running import Call, read_ahead, row_configs, said
from fusion_backend.kernels.common.cooperative_rows import shareable
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.kernels.norm import backward_short
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.norm import forward_cooperative as norms_shared
from fusion_backend.kernels.norm import forward_split as norms_split
from fusion_backend.kernels.norm.backward import MAX_HELD_BACKWARD
from fusion_backend.kernels.norm.backward_cooperative import backward_cooperative
from fusion_backend.kernels.norm.backward_few import backward_few
from fusion_backend.kernels.norm.backward_long import backward_long
from fusion_backend.kernels.norm.operands import Backward, Forward

SHAPES = [
    (16384, 4096),
    (8192, 8192),
    (2048, 32768),
    (64, 131072),
    (32768, 1024),
    (192, 5120),
    (16, 8192),
]


def normalisations(device) -> Iterator[Call]:
    """Layer norm in bf16, forward and backward."""
    for rows, n in SHAPES if torch.cuda.is_available() else ((64, 256),):
        x, w, b, dy = (
            torch.randn(s, device=device, dtype=torch.bfloat16)
            for s in ((rows, n), n, n, (rows, n))
        )
        norm = norms.Norm(w, b, None, 1e-5, True)
        yield from whole_rows(x, norm)
        yield from shared_rows(x, norm)
        _, _, mean, rstd = norms.forward(x, None, norm, True)
        needs = (True, True, True)
        args = dy, None, x, mean, rstd, norm, needs, torch.empty_like(x), None
        yield from norm_backwards("layer_norm", args, rows, n)


def whole_rows(x: torch.Tensor, norm: norms.Norm) -> Iterator[Call]:
    """The forward kernel in which a program has its rows to itself."""
    rows, n = x.shape
    configs = row_configs(n)
    # With few rows a call is a chain of latencies: read before the sums, weight and bias add none
    # to it. A long row reads them from L2 each time, 128 KB beside its own 64: by way of shared
    # memory it leaves L1 to them.
    held = [c for c in configs if c[0] >= n]
    ahead = read_ahead(held) * (rows > 1024)
    configs += [(*c, 0, 0, True) for c in held] + ahead + [(*c, True) for c in ahead if n <= 8192]
    configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16, 32) if part < n]
    for c in (Config(*c) for c in configs):
        run = functools.partial(norms.forward, x, None, norm, True, c)
        yield Call(f"layer_norm {rows}x{n}", said(c), run)


def shared_rows(x: torch.Tensor, norm: norms.Norm) -> Iterator[Call]:
    """The forward kernel in which several programs share a row; for rows of more than 8192."""
    rows, n = x.shape
    y, moments = torch.empty_like(x), torch.empty(2, rows, device=x.device)
    whole = dict(STRIDE=n, RESIDUAL_STRIDE=0, N=n, CENTRED=True, THRESHOLD=0, SCALE=1.0)
    wide = itertools.product((2048, 4096), [1], (2, 4), (7, 10, 12, 14, 16), [3])
    for c in itertools.starmap(Config, wide):
        fits = c.block // c.warps == 1024 and 20 <= c.warps * c.programs <= 32
        if fits and n > 8192 and shareable(x, c):
            tensors = x, None, None, norm.weight, norm.bias, y, None, *moments
            operands = Forward(*tensors, rows, 0.0, 1e-5)
            run = functools.partial(norms_shared.forward, operands, c, **whole)
            yield Call(f"layer_norm shared {rows}x{n}", said(c), run)


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
            yield Call(f"{name} backward {rows}x{n}", said(c), run)
        if not short and each == 8:
            run = functools.partial(backward_long, Backward(*args), c)
            yield Call(f"{name} backward by columns {rows}x{n}", said(c), run)
    wide = (
        itertools.product((512, 1024, 2048, 4096), [1], (1, 2, 4, 8), (2, 4, 7, 8, 16), (3, 4))
        if not short
        else ()
    )
    for c in itertools.starmap(Config, wide):
        if c.block == 512 * c.warps and c.warps * c.programs in (14, 16) and shareable(args[2], c):
            run = functools.partial(backward_cooperative, Backward(*args), c)
            yield Call(f"{name} backward shared {rows}x{n}", said(c), run)


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
                yield Call(
                    f"add_rms_norm {rows}x{n}",
                    said(c),
                    functools.partial(norms.forward, x, r, norm, True, c),
                )
        _, h, mean, rstd = norms.forward(x, r, norm, True)
        args = dy, dy, h, mean, rstd, norm, (True, True, False), None
        words = f"add_rms_norm backward, whole {rows}x{n}"
        rule = backward_short.backward_config(n)
        yield Call(words, "two kernels", functools.partial(norms_backward.backward, *args, rule))
        for warps in (4, 8, 16, 32):
            if 8 <= block // (32 * warps) <= 64:
                operands = Backward(*args[:7], torch.empty_like(h), None)
                run = functools.partial(backward_few, operands, warps)
                yield Call(words, f"one kernel, warps={warps}", run)
    rows, n = (64, 131072) if big else (2, 70000)
    x, y, w = (
        torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((rows, n), (rows, n), n)
    )
    mean, rstd = torch.empty(2, rows, device=device)
    whole = dict(STRIDE=n, RESIDUAL_STRIDE=0, N=n, CENTRED=True, THRESHOLD=0, SCALE=1.0)
    for piece, warps in ((4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16)):
        operands = Forward(x, None, None, w, w, y, None, mean, rstd, rows, 0.0, 1e-5)
        yield Call(
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
        seed = torch.randint(2**62, (1,), device=device)
        for part, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)):
            words = f"BLOCK={part} warps={warps}"
            yield Call(
                f"dropout_add {rows}x{n}",
                words,
                functools.partial(dropout_add.run, x, r, 0.1, seed, part, warps),
            )
            run = functools.partial(dropout_add.run, x, None, 0.1, seed, part, warps)
            yield Call(f"dropout_add backward {rows}x{n}", words, run)
        norm = norms.Norm(w, b, None, 1e-5, True, Dropout(seed, 0.1))
        configs = row_configs(n)
        # two tensors
        ahead = [c for c in read_ahead(configs) if c[0] * c[1] * 4 * (c[4] - 1) * c[3] <= 220 << 10]
        configs += ahead + [(*c, True) for c in ahead]
        configs += [(part, 1, warps) for part in (4096, 8192) for warps in (8, 16) if part < n]
        for c in (Config(*c) for c in configs):
            run = functools.partial(norms.forward, x, r, norm, True, c)
            words = said(c)
            yield Call(f"dropout_add_layer_norm {rows}x{n}", words, run)
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
