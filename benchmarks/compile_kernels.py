"""Compile every kernel for sm_90, without a GPU: registers, spills and shared memory of what the
launchers would run.

    python -m benchmarks.compile_kernels [PATTERN ...] [--each-kernel] [--out FILE.json]
    python -m benchmarks.compile_kernels --mutations [PATTERN ...]

The launchers' own choice of tile sizes is compiled. --out keeps the rows that the file has of other
versions of Triton, so that versions can be compared. With --mutations it prints instead which
arguments torch believes that a kernel writes: where torch's analysis fails, it takes all to be
written, and Inductor copies them. Exit status: 1 where a kernel spills more than is known to pay,
asks for more shared memory than there is, shares rows among more programs than run at once, or
computes with a tile in two layouts, "torn": it moves through shared memory in between. The same
where Triton mixes up the rows of a tile, "mixed".
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is defined

import torch

from benchmarks.launches.launches import all_launches
from benchmarks.launches.mutations import check_mutations
from benchmarks.launches.resources import (
    check_resources,
    first_of_each_kernel,
    keep_other_versions,
    kernels,
)
from benchmarks.launches.sites import SITES
from benchmarks.records.runs import Run, machine


def main(argv: list[str] | None = None) -> int:
    known = list(dict.fromkeys(site.pattern for site in SITES))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument(
        "--mutations", action="store_true", help="what torch believes that each kernel writes"
    )
    parser.add_argument(
        "--each-kernel", action="store_true", help="only the first launch of each kernel"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    if unknown := set(args.patterns) - set(known):
        parser.error(f"no pattern {', '.join(sorted(unknown))} here; there are {', '.join(known)}")
    torch.set_float32_matmul_precision("high")  # kernels of products take fp32 only as TF32
    found = list(all_launches(args.patterns))
    if not args.patterns and (missing := kernels() - {one.launch.name for one in found}):
        names = ", ".join(sorted(missing))
        raise SystemExit(f"nothing in benchmarks/launches/sites.py launches {names}")
    if args.each_kernel:
        found = first_of_each_kernel(found)
    if args.mutations:  # torch does not see kernels in Gluon, which opaque operators launch
        seen = [one for one in found if not one.launch.kernel.is_gluon()]
        return 1 if check_mutations(seen) else 0
    run = Run("compile_kernels", machine(torch.device("cpu"), "benchmarks.compile_kernels"))
    bad = check_resources(found, run)
    if args.out:
        keep_other_versions(run, args.out)
        run.save(args.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
