"""A pattern's kernel at every BLOCK and number of warps, beside eager PyTorch and plain Inductor.

    python -m benchmarks.block_size --pattern add_mul [--size 20000000] [--block 128 256 512 1024] [--warps 4 8]
    python -m benchmarks.block_size --pattern softmax --size rows=16384,n=4096 --dtype bf16 --out FILE.json

BLOCK is the number of elements that a program takes at a time: of an elementwise kernel all it
does, of a row kernel a part of its row, or the whole row where BLOCK is as long. Prints GB/s
(counted bytes over the median kernel time, L2 flushed, all in turn); `*` marks what the pattern's
launcher picks. Needs a GPU, or TRITON_INTERPRET=1 to be tried.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.measure import said
from benchmarks.options import output, positive
from benchmarks.results import FAILED, BlockRow, Run, Spread, machine
from benchmarks.selection import case_of, dtype_of, takes, unfit
from benchmarks.sweep import INTERPRETED, NO_GPU, run_now
from benchmarks.timing import ROUNDS, Clock, in_turn
from benchmarks.work import SMALL, WORK, Work
from fusion_backend.frontends.dynamo import patterns
from fusion_backend.kernels.common.blocks import blocks_of
from fusion_backend.kernels.common.launch import interpreting, trial
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.softmax import forward as softmax
from fusion_backend.ops.pattern import REGISTRY

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
    pattern = REGISTRY[work.pattern]
    return pattern.kernel_fn(*args, *([False] if pattern.saves else []))


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
            f"{work.pattern} has more to choose than a BLOCK: python -m benchmarks.sweep {work.pattern}"
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
    if not REGISTRY[work.pattern].kernel_fn:
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
    if pattern not in REGISTRY:
        raise ValueError(f"no pattern {pattern}; there is {', '.join(sorted(REGISTRY))}")
    first = [w for w in (WORK if on_gpu else SMALL) if w.pattern == pattern and not w.linear][:1]
    work = (
        first[0]
        if first
        else Work(pattern, REGISTRY[pattern].cases[-1 if on_gpu else 0], torch.float32)
    )
    case = case_of(size if "=" in size else f"size={size}") if size else work.case
    if not takes(pattern, case):
        raise ValueError(unfit(pattern, case))
    return work._replace(case=case, train=False, dtype=dtype_of(dtype) if dtype else work.dtype)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block_size",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pattern", required=True, metavar="NAME")
    parser.add_argument("--size", help="elements, or a case such as rows=16384,n=4096")
    parser.add_argument(
        "--dtype", help="f32, bf16 or f16 (default: as benchmarks.patterns lists it)"
    )
    parser.add_argument(
        "--block", type=int, nargs="+", default=list(BLOCKS), metavar="N", help="powers of two"
    )
    parser.add_argument(
        "--warps", type=int, nargs="+", default=list(WARPS), metavar="N", help="powers of two"
    )
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--out", type=output, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    if wrong := [n for n in (*args.block, *args.warps) if n < 1 or n & (n - 1)]:
        parser.error(f"{wrong[0]} is no power of two")
    if device.type == "cpu" and not interpreting():
        parser.error(NO_GPU)
    try:
        work = work_of(args.pattern, args.size, args.dtype, device.type == "cuda")
        with torch.no_grad():
            found = measure(work, Clock(device), args.block, args.warps, args.rounds)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(
            f"{parser.prog}: interrupted; configurations take turns, so none is measured yet",
            file=sys.stderr,
        )
        return 130
    print(machine(device, "")["gpu"] or INTERPRETED)
    print(table(found))
    if args.out:
        Run("block_size", machine(device, "benchmarks.block_size"), found).save(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
