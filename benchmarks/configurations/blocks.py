"""A pattern's kernel at every BLOCK and number of warps."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.configurations.running import run_now
from benchmarks.measure.failures import said
from benchmarks.measure.timing import Clock, in_turn
from benchmarks.pattern_runs.contenders import CONTENDERS
from benchmarks.records.rows import FAILED, BlockRow, Spread
from benchmarks.workloads.listed import SMALL, WORK
from benchmarks.workloads.selection import case_of, dtype_of, takes, unfit
from benchmarks.workloads.work import Work
from fusion_backend.kernels.common.blocks import blocks_of
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.softmax import forward as softmax
from fusion_backend.ops.registry import FUSION_RULES

BLOCKS, WARPS = (128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)
Blocked = Callable[[int, int], object]  # a call with BLOCK and warps
ROWWISE = {  # where a launcher asks for BLOCK, rows a program, warps and maybe more
    "softmax": (softmax, "row_config"),
    **dict.fromkeys(
        ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), (norms, "forward_config")
    ),
}


def forward(work: Work, args: list) -> object:
    """The pattern's own launcher."""
    pattern = FUSION_RULES[work.pattern]
    return pattern.launched(args, save=False)


def elementwise(work: Work, args: list) -> tuple[Blocked, tuple[int, int]]:
    """The launch that the pattern would make, with another BLOCK, where programs take blocks
    (kernels/blocks.py).
    """
    launches = []
    with trial(lambda *launch: launches.append(launch)):
        forward(work, args)
    kernel, grid, values, options = launches[0]
    given = dict(zip(kernel.arg_names, values, strict=False)) | options
    if len(launches) > 1 or not {"last", "BLOCK"} <= given.keys():
        raise ValueError(
            f"{work.pattern} has more to choose than a BLOCK: "
            f"python -m benchmarks.sweep {work.pattern}"
        )
    size = (grid[0] - 1) * given["BLOCK"] + given["last"]

    def call(block: int, warps: int):
        grid, last = blocks_of(size, block)
        run_now(kernel, grid, (), given | dict(last=last, BLOCK=block, num_warps=warps))

    return call, (given["BLOCK"], given["num_warps"])


def rowwise(work: Work, args: list) -> tuple[Blocked, tuple[int, int]]:
    """The launcher with another answer to its question; as it would, short rows share a program."""
    place, n, answers = ROWWISE[work.pattern], args[0].shape[-1], []
    ask = getattr(*place)

    def remember(*its):
        answers.append(ask(*its))
        return answers[-1]

    with mock.patch.object(*place, remember), trial(lambda *_: None):
        forward(work, args)
    config = answers[0]

    def call(block: int, warps: int):
        other = [block, max(1, 2048 // block) if block >= n else 1, warps, *config[3:]]
        with (
            mock.patch.object(*place, lambda *_: getattr(config, "_make", tuple)(other)),
            trial(run_now),
        ):
            return forward(work, args)

    return call, (config[0], config[2])


def blocked(work: Work, args: list) -> tuple[Blocked, tuple[int, int]]:
    """The call, and the BLOCK and warps that the pattern's launcher takes itself."""
    if not FUSION_RULES[work.pattern].kernel_fn:
        raise ValueError(f"{work.pattern} has no kernel")
    return (rowwise if work.pattern in ROWWISE else elementwise)(work, args)


def measure(
    work: Work, clock: Clock, blocks: list[int], warps: list[int], rounds: int
) -> list[BlockRow]:
    """A row for eager, Inductor and every configuration; one that does not compile says why."""
    args = work.arguments(clock.device)
    call, chosen = blocked(work, args)
    blocks, warps = sorted({*blocks, chosen[0]}), sorted({*warps, chosen[1]})
    reference = work.function
    found, calls = {}, {}
    for who in ("eager", "inductor"):
        fn = CONTENDERS[who](reference)
        found[who] = BlockRow(work.name, who, None, None, None, None)
        calls[who] = functools.partial(lambda fn, args: fn(*args), fn)
    for block in blocks:
        for n in warps:
            if block >= 32 * n:  # a thread has an element at least
                name = f"{block} {n}"
                found[name] = BlockRow(
                    work.name, "kernel", block, n, None, None, chosen=(block, n) == chosen
                )
                calls[name] = functools.partial(lambda block, n, _: call(block, n), block, n)
    for name, run in list(calls.items()):
        try:
            run(args)
        except Exception as error:
            found[name].status, found[name].note = FAILED, said(error)
            del calls[name]
    for name, samples in in_turn(calls, lambda: args, clock, rounds).items():
        found[name].kernel = Spread.of(samples)
        found[name].rate_bytes = work.bytes / statistics.median(samples) * 1e3
    return list(found.values())


def table(found: list[BlockRow]) -> str:
    """GB/s: a line a BLOCK, a column a number of warps."""
    grid = {(r.block, r.warps): r for r in found if r.who == "kernel"}
    columns = sorted({w for _, w in grid})
    lines = [
        f"{found[0].work}: GB/s",
        f"{'BLOCK':>8}" + "".join(f"{f'{w} warps':>11}" for w in columns),
    ]
    for block in sorted({b for b, _ in grid}):
        cells = [cell(grid.get((block, w))) for w in columns]
        lines.append(f"{block:8}" + "".join(f"{c:>11}" for c in cells))
    lines += [f"{r.who:>8}{cell(r):>11}" for r in found if r.who != "kernel"]
    failed = [
        f"  {r.who} BLOCK={r.block} warps={r.warps} fails: {r.note}"
        for r in found
        if r.status == FAILED
    ]
    return "\n".join(lines + failed)


def cell(row: BlockRow | None) -> str:
    if row is None:
        return ""
    return f"{row.rate_bytes / 1e9:.4g}{'*' if row.chosen else ' '}" if row.kernel else "fails "


def work_of(pattern: str, size: str | None, dtype: str | None, on_gpu: bool) -> Work:
    """The size asked for, or the first one of the pattern that benchmarks.patterns measures."""
    if pattern not in FUSION_RULES:
        raise ValueError(f"no pattern {pattern}; there is {', '.join(sorted(FUSION_RULES))}")
    first = [w for w in (WORK if on_gpu else SMALL) if w.pattern == pattern and not w.linear][:1]
    work = (
        first[0]
        if first
        else Work(pattern, FUSION_RULES[pattern].cases[-1 if on_gpu else 0], torch.float32)
    )
    case = case_of(size if "=" in size else f"size={size}") if size else work.case
    if not takes(pattern, case):
        raise ValueError(unfit(pattern, case))
    return work._replace(case=case, train=False, dtype=dtype_of(dtype) if dtype else work.dtype)
