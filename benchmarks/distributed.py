"""Training on several GPUs under plain Inductor and fusion: losses, step time, memory, graphs.

    python -m benchmarks.distributed --out benchmarks/results/ranks.json
    python -m benchmarks.distributed --model gpt2 --how fsdp-blocks --steps 50 --ranks 2

One process a GPU, through NCCL; without GPUs two processes of a tiny model, through gloo. They are
started afresh for each row, so that no memory is left from the one before. Both backends train the
same weights on the same batches with AdamW; then their steps are timed in turns. --how says how a
model is spread (benchmarks/rank_runs/wrapping.py). With "alone" each rank trains by itself: that is
the gain of a single GPU, of which the table says how much the other ways keep. The gain that
"fsdp-loss" is compared with is that of "alone-blocks": in both, blocks and loss are compiled one by
one. Nothing is dropped out, so that losses differ by rounding alone, unless --dropout asks for it.
The same training in eager mode shows how far rounding takes a loss. Exit status: 1 where fusion's
loss is further than that from plain Inductor's, which is not asked with --dropout.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.command_line.options import duration, output, positive
from benchmarks.pages.rank_figures import table, wrong
from benchmarks.rank_runs.running import Work, free_port, work
from benchmarks.rank_runs.training import Plan
from benchmarks.rank_runs.wrapping import WRAPPINGS
from benchmarks.records.runs import Run, machine
from benchmarks.subjects.model_zoo import ENTRIES
from benchmarks.subjects.plain_models import Size

# batch (of a rank), seq, layers, width, heads, inner, vocabulary, kv heads
SIZES = {
    "gpt2": Size(16, 1024, 6, 1024, 16, 4096, 50304),
    "llama": Size(6, 2048, 4, 2048, 32, 8192, 32000, kv=8),
}


def main(argv: list[str] | None = None) -> int:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--how", nargs="+", choices=WRAPPINGS, default=list(WRAPPINGS))
    parser.add_argument(
        "--ranks", type=positive, default=gpus or 2, help="processes (default: all)"
    )
    parser.add_argument("--batch", type=positive, help="sequences of a rank")
    parser.add_argument("--layers", type=positive, help="of each model")
    parser.add_argument("--steps", type=positive, default=200 if gpus else 5)
    parser.add_argument("--rounds", type=positive, default=7 if gpus else 2, help="turns of each")
    parser.add_argument("--dropout", action="store_true", help="train with the model's own")
    parser.add_argument("--gate", default="auto" if gpus else "always", help="fusion.gate")
    parser.add_argument("--measure-s", type=duration, default=20.0, help="fusion.measure_s")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    if gpus and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: the number of GPUs is {gpus}")
    options = {"fusion.gate": args.gate, "fusion.measure_s": args.measure_s}
    plan = Plan(args.steps, args.rounds, dropout=args.dropout, options=options)
    jobs = []
    for name in args.model:
        size = SIZES[name] if gpus else ENTRIES[name].tiny
        layers, batch = args.layers or size.layers, args.batch or size.batch
        size = dataclasses.replace(size, layers=layers, batch=batch)
        jobs += [(name, size, how) for how in args.how]
    device = torch.device("cuda" if gpus else "cpu")
    run = Run("distributed", machine(device, "benchmarks.distributed"))
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "ranks.json"
        for job in jobs:
            print(job[0], job[2], flush=True)
            mine = Work(job, plan, args.ranks, free_port(), device.type, run, out)
            mp.spawn(work, (mine,), nprocs=args.ranks)
            run = Run.load(out)
    print(run.about["gpu"] or "no GPU: two processes through gloo, times mean nothing")
    print(table(run.rows), end="")
    lost = wrong(run.rows)
    for line in lost:
        print(line)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
