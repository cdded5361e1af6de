"""Time the configurations of a kernel directly, to choose the ones its launcher picks.

    python -m benchmarks.sweep NAME ... [--out FILE.json]

This prints the fastest configurations of each piece of work. It needs a GPU; without one,
TRITON_INTERPRET=1 runs the kernels in Triton's interpreter on tiny sizes, which shows no more than
that they run. benchmarks.block_size compares BLOCK and warps alone with eager and Inductor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.configurations.running import INTERPRETED, NO_GPU, timed
from benchmarks.configurations.sweeps import SWEEPS
from benchmarks.measure.timing import Clock
from benchmarks.records.runs import Run, machine
from fusion_backend.kernels.common.launch import interpreting


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"kernels: {', '.join(SWEEPS)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all times as JSON")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(SWEEPS)):
        parser.error(f"no sweep for {', '.join(unknown)}; there is {', '.join(SWEEPS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run("sweep", machine(device, "benchmarks.sweep"))
    if device.type == "cpu":
        if not interpreting():
            parser.error(NO_GPU)
        print(INTERPRETED)
    for configs in dict.fromkeys(SWEEPS[name] for name in args.names):
        for work, times in timed(
            configs(device), Clock(device), 7 if device.type == "cuda" else 1
        ).items():
            print(work)
            for ms, words in sorted(times)[:12]:
                print(f"  {ms:9.4f} ms  {words}", flush=True)
            run.rows += [dict(work=work, config=words, ms=ms) for ms, words in sorted(times)]
            if args.out:
                run.save(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
