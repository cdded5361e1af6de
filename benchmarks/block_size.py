"""A pattern's kernel at every BLOCK and number of warps, next to eager PyTorch and plain Inductor.

    python -m benchmarks.block_size --pattern add_mul --size 20000000 --block 128 256 --warps 4 8
    python -m benchmarks.block_size --pattern softmax --size rows=16384,n=4096 --dtype bf16

BLOCK is the number of elements that a program takes at a time: everything that it does of an
elementwise kernel; of a row kernel a part of its row, or the whole row where BLOCK is as long. The
table shows GB/s: the counted bytes over the median kernel time, with the L2 flushed and the
configurations in turns. `*` marks what the pattern's launcher picks. The command needs a GPU;
TRITON_INTERPRET=1 shows without one that the kernels run.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.command_line.options import output, positive
from benchmarks.configurations.blocks import BLOCKS, WARPS, measure, table, work_of
from benchmarks.configurations.running import INTERPRETED, NO_GPU
from benchmarks.measure.timing import ROUNDS, Clock
from benchmarks.records.runs import Run, machine
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.common.launch import interpreting


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
