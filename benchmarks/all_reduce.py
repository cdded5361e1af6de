"""Sums over ranks with the residual sum and the RMS norm behind them: the kernels over symmetric
memory, in one shot and in two, against NCCL with Inductor's kernel.

    python -m benchmarks.all_reduce --out benchmarks/results/all-reduce.json
    python -m benchmarks.all_reduce --ranks 2 --n 4096 --kb 16 1024 --rounds 5

One process a GPU; without GPUs two processes through gloo, of small sizes, in which the plain code
stands for the kernels. Each row is one size of x on a rank; benchmarks/rank_runs/sums.py says what
is timed. All contenders take turns, and their results are compared with fp64. Exit status: 1 where
a kernel is further from fp64 than twice what NCCL and Inductor are, or ranks differ in a bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.command_line.options import output, positive
from benchmarks.rank_runs.running import free_port
from benchmarks.rank_runs.sums import Sums, work, wrong
from benchmarks.records.runs import Run, machine

KB = [16, 64, 256, 1024, 4096, 16384, 65536]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def main(argv: list[str] | None = None) -> int:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=positive, default=gpus or 2, help="processes (default: all)"
    )
    parser.add_argument("--kb", type=positive, nargs="+", default=KB if gpus else KB[:2])
    parser.add_argument("--n", type=positive, nargs="+", default=[2048, 4096] if gpus else [256])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=positive, default=9 if gpus else 2, help="turns of each")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    if gpus and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: the number of GPUs is {gpus}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no kernel here needs it
    dtype = DTYPES[args.dtype]
    cases = [(max(1, (kb << 10) // (n * dtype.itemsize)), n) for n in args.n for kb in args.kb]
    device = torch.device("cuda" if gpus else "cpu")
    about = machine(device, "benchmarks.all_reduce")
    about["nccl_nvls"] = os.environ.get("NCCL_NVLS_ENABLE")
    run = Run("all_reduce", about)
    print(about["gpu"] or "no GPU: processes through gloo, times mean nothing", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "sums.json"
        each = Sums(cases, dtype, args.rounds, args.ranks, free_port(), device.type, run, out)
        mp.spawn(work, (each,), nprocs=args.ranks)
        run = Run.load(out)
    told = [words for row in run.rows for words in wrong(row)]
    for words in told:
        print(words)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
