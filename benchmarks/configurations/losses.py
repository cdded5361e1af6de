"""The configurations of the kernels of losses that are worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton

from benchmarks.configurations.running import Call
from fusion_backend.kernels.loss import channel_cross_entropy, cross_entropy, soft_targets
from fusion_backend.kernels.loss.channel_cross_entropy import Loss, Steps
from fusion_backend.kernels.loss.soft_targets import Target


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
        yield Call(f"cross_entropy {rows}x{v}", f"BLOCK={block} each={each} warps={warps}", run)
    for block, warps, stages in itertools.product((2048, 8192, 16384), (4, 8, 16, 32), (1, 2)):
        if 8 <= block // (32 * warps) <= 32:
            words = f"BLOCK={block} warps={warps} stages={stages}"
            # as linear_cross_entropy does; last, for it changes x
            part = x[: rows // 4], target[: rows // 4]
            run = functools.partial(
                cross_entropy.gradient_in_place, *part, scale, -100, 0.0, (block, warps, stages)
            )
            yield Call(f"cross_entropy in place {rows // 4}x{v}", words, run)


def soft_losses(device) -> Iterator[Call]:
    """A divergence from a teacher, and a cross entropy of given probabilities."""
    big = torch.cuda.is_available()
    for rows, v in ((8192, 128256), (8192, 32000), (4096, 1000)) if big else ((8, 1000),):
        x, y = (torch.randn(rows, v, device=device, dtype=torch.bfloat16) for _ in range(2))
        dloss, p = torch.ones((), device=device), torch.softmax(y, -1)
        for name, target in (
            ("distillation_loss", Target(y, 0.5, True, 0.5, True)),
            ("soft_cross_entropy", Target(p)),
        ):
            for warps, each in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
                lanes = 256 * warps
                if lanes > triton.next_power_of_2(v):
                    continue
                run = functools.partial(soft_targets.forward, x, target, (lanes, each, warps))
                yield Call(f"{name} {rows}x{v}", f"LANES={lanes} each={each} warps={warps}", run)
            _, kept = soft_targets.forward(x, target)
            args = x, target, kept, dloss, (True, False)
            for block, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (4, 8, 16)):
                if 8 <= block // (32 * warps) <= 32 and block <= triton.next_power_of_2(v):
                    run = functools.partial(soft_targets.backward, *args, (block, warps, 1))
                    words = f"BLOCK={block} warps={warps}"
                    yield Call(f"{name} backward {rows}x{v}", words, run)


def channel_losses(device) -> Iterator[Call]:
    """Of segmentation: Cityscapes, ADE20K, COCO-Stuff, and volumes of four classes."""
    shapes = (16, 19, 512), (16, 150, 128), (32, 171, 64), (8, 4, 512)
    for b, c, n in shapes if torch.cuda.is_available() else ((2, 19, 8),):
        x = torch.randn(b, c, n, n, device=device, dtype=torch.bfloat16)
        target, loss = torch.randint(c, (b, n, n), device=device), Loss(None, -100, 0.0)
        _, _, kept = channel_cross_entropy.forward(x, target, loss, False, True)
        scale = torch.ones((), device=device)
        for size, channels, warps in itertools.product((64, 128, 256, 512), (2, 4, 8, 16), (1, 2)):
            if size < 64 * warps or channels > triton.next_power_of_2(c):
                continue
            for stages in (0, 3, 5):
                how = Steps(size, channels, warps, stages)
                words = " ".join(f"{name}={number}" for name, number in how._asdict().items())
                work, args = f"channel_cross_entropy {b}x{c}x{n}x{n}", (x, target)
                run = functools.partial(
                    channel_cross_entropy.forward, *args, loss, False, True, how
                )
                yield Call(work, words, run)
                args = (*args, kept, scale, loss, how)
                run = functools.partial(channel_cross_entropy.backward, *args)
                yield Call(work.replace("py ", "py backward "), words, run)
