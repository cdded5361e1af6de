"""Decoding with a Llama whose layers are divided over GPUs, under plain Inductor and fusion.

    python -m benchmarks.tensor_parallel --out benchmarks/results/tensor-parallel.json
    python -m benchmarks.tensor_parallel --ranks 2 --batch 1 16 --rounds 5

One process a GPU, through NCCL; without GPUs two processes of a tiny model, through gloo. A step
computes one token with seq - 1 tokens in the cache (benchmarks/rank_runs/decoding.py). The width
and the batches are those at which the sum over ranks was timed alone. All contenders take turns,
and their logits are compared with those of the whole model in fp32, on a CPU in fp64. Exit status:
1 where fusion is further from these than twice what plain Inductor is, meets a fault, or computes
no sum over ranks by a kernel although it is asked to.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.command_line.options import output, positive
from benchmarks.pages.decoding_figures import decoding
from benchmarks.rank_runs.decoding import Decoding, work, wrong
from benchmarks.rank_runs.running import free_port
from benchmarks.records.runs import Run, machine
from benchmarks.subjects.model_zoo import TINY
from benchmarks.subjects.plain_models import Size

# batch, seq, layers, width, heads, inner, vocabulary, kv heads
LLAMA = Size(1, 2048, 4, 4096, 32, 14336, 32000, kv=8)
BATCHES = [2, 8, 32, 128]


def main(argv: list[str] | None = None) -> int:
    gpus = torch.cuda.device_count()
    ranks = next((n for n in (8, 4, 2) if n <= gpus), 2)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=positive, default=ranks, help="processes (default: 8, 4 or 2)"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=BATCHES if gpus else [2])
    parser.add_argument("--seq", type=positive, help="tokens with the new one (default: 2048)")
    parser.add_argument("--layers", type=positive, help="of the model (default: 4)")
    parser.add_argument("--rounds", type=positive, default=9 if gpus else 2, help="turns of each")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    if gpus and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: the number of GPUs is {gpus}")
    size = LLAMA if gpus else TINY
    asked = {name: getattr(args, name) for name in ("seq", "layers") if getattr(args, name)}
    size, dtype = dataclasses.replace(size, **asked), torch.bfloat16 if gpus else torch.float32
    if size.kv % args.ranks:
        parser.error(f"--ranks {args.ranks}: the model has {size.kv} heads of keys")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no kernel here needs it
    device = torch.device("cuda" if gpus else "cpu")
    about = machine(device, "benchmarks.tensor_parallel")
    about["nccl_nvls"] = os.environ.get("NCCL_NVLS_ENABLE")
    run = Run("tensor_parallel", about)
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "decoding.json"
        each = Decoding(
            size, args.batch, dtype, args.rounds, args.ranks, free_port(), device.type, run, out
        )
        mp.spawn(work, (each,), nprocs=args.ranks)
        run = Run.load(out)
    print(about["gpu"] or "no GPU: processes through gloo, times mean nothing")
    print(decoding(run, []), end="")
    told = [words for row in run.rows for words in wrong(row)]
    for words in told:
        print(words)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
