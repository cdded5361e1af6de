"""Is code that was not written for this project right with our kernels? Without a GPU.

    TRITON_INTERPRET=1 python -m benchmarks.check_foreign
    TRITON_INTERPRET=1 python -m benchmarks.check_foreign --only 'attention.*train' --shard 1/2
    TRITON_INTERPRET=1 python -m benchmarks.check_foreign --vary some-gradients strides dynamic

Each graph of benchmarks/foreign_code/ is built with small sizes, those in bf16 in fp16, and decided
as on an H200 with `fusion.gate=always`. It runs operator by operator, its kernels in Triton's
interpreter. Results and gradients may be further from fp64 than those of eager code by a factor of
10 and what roundings in another order explain. --vary changes the graphs: every other parameter and
activation gets no gradient, inputs lie otherwise in memory, or sizes are dynamic. Exit status: 0; 1
when a graph was wrong or failed; 2 without TRITON_INTERPRET=1 and when the arguments make no sense.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import sys
import warnings

import fusion_backend.patterns  # noqa: F401  (fills the registry)

from benchmarks.foreign_runs.interpreting import FAILED, VARIATIONS, WRONG, checked
from benchmarks.foreign_runs.request import selected, shard


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_foreign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="REGEX", help="graphs whose name or family it matches")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="every Nth")
    parser.add_argument("--vary", nargs="+", choices=VARIATIONS, default=["as-listed"])
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("set TRITON_INTERPRET=1 before Python starts")
    try:
        graphs = selected(args.only, args.shard)
    except ValueError as error:
        parser.error(str(error))
    logging.disable(logging.WARNING)
    counts = collections.Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about overflows in the interpreter
        for name, graph in graphs.items():
            for variation in args.vary:
                found = checked(graph, variation)
                counts[found.status] += 1
                sites = ", ".join(f"{n} {pattern}" for pattern, n in found.sites.items())
                words = "; ".join(filter(None, [sites or "no site", found.words]))
                print(f"{name}, {variation}: {found.status}: {words}", flush=True)
    print(", ".join(f"{n} {status}" for status, n in counts.items()))
    return 1 if counts[WRONG] or counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
