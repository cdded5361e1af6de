"""The host's microseconds a call, by layer, under plain Inductor and under fusion with all sites.

    python -m benchmarks.host --out benchmarks/results/host.json
    python -m benchmarks.host --only layer_norm softmax --mode train --code DIR

The graphs are so small that the host, not the GPU, decides how long a call takes. The table shows
µs a call (median of turns, in rotation), what fusion takes more than plain Inductor with its
uncertainty, the same for plain Inductor compiled a second time, and what the generated code
launches and allocates. Layers are timed separately, with timers whose own cost is taken off. With
--code the generated code is written into a directory.

--only also takes two larger graphs, mlp and gated_mlp, whose kernels take the host longer than
Inductor's.

A row that surely takes 2 µs more than plain Inductor's is named at the end, and makes the exit
status 1. Without a GPU nothing is timed: the code for an H200 is generated, and counted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.command_line.options import output, positive
from benchmarks.command_line.progress import progress
from benchmarks.host_runs import without_gpu
from benchmarks.host_runs.layers import Layers
from benchmarks.host_runs.measuring import measured
from benchmarks.host_runs.summary import only_counted, slower, summarized, table
from benchmarks.records.runs import Run, machine
from benchmarks.subjects.small_graphs import BLOCKS, SMALL_GRAPHS
from fusion_backend.compat import launchers
from fusion_backend.kernels.common.launch import interpreting

MODES = ("infer", "train")
GRAPHS = SMALL_GRAPHS | BLOCKS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=GRAPHS, default=list(SMALL_GRAPHS))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=positive, default=300, help="turns of each contender")
    launcher = "who launches our kernels (compat/launchers.py)"
    parser.add_argument(
        "--launcher", choices=("triton", "inductor"), default="inductor", help=launcher
    )
    parser.add_argument("--code", type=Path, metavar="DIR", help="where generated code goes")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    launchers.USED = args.launcher == "inductor"
    if interpreting():
        parser.error("the code for a GPU has no interpreted kernels; unset TRITON_INTERPRET")
    run, layers = Run("host", machine(device, "benchmarks.host")), Layers()
    layers.calibrate()
    work = [(name, mode) for name in args.only for mode in args.mode]
    with progress(len(work), "host") as begin:
        for name, mode in work:
            begin(f"{name} {mode}")
            graph, train = GRAPHS[name], mode == "train"
            if device.type == "cuda":
                found = measured(graph, train, device, args.rounds, layers)
                run.rows.append(summarized(name, mode, found))
                code = {who: one.code for who, one in found.items()}
            else:
                counts, code = without_gpu.counted(graph, train)
                run.rows.append(only_counted(name, mode, counts))
            if args.code:
                write_code(args.code, f"{name}-{mode}".replace(" ", "-"), code)
            if args.out:
                run.save(args.out)
    print(run.about["gpu"] or "no GPU: what is generated for an H200, counted")
    print(table(run.rows))
    lost = slower(run.rows)
    for line in lost:
        print(line)
    return 1 if lost else 0


def write_code(folder: Path, name: str, code: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for who, texts in code.items():
        for i, text in enumerate(texts):
            (folder / f"{name}-{who}-{i}.py").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
