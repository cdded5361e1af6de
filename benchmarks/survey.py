"""Does every model class of transformers come out of the rewriter as eager computes it? On a CPU,
tiny, with random weights.

    python -m benchmarks.survey [--kind causal ...] [--only CLASS ...] [--attention eager]
        [--dynamic] [--part 1/2] [--regions]

Each class is built with small sizes, run eagerly, and compiled with `fusion.gate=always`, so that
every site is rewritten to its plain torch code; the rewritten graphs run as they are, without
Inductor. Outputs, and the gradients of a weighted sum of them, must agree. Each class gets a line:
ok, WRONG, FAILED, or skipped with the reason (it cannot be built so small, or eager or
torch.compile without this backend fails, too). With --regions the sites, decided as for an H200,
are compared with the regions in which the gate would measure them, on the inputs that it makes up:
it leaves a site whose results differ to Inductor. Exit status: 0, or 1 when a class was wrong or
failed.
"""

from __future__ import annotations

import argparse
import collections
import logging
import re
import sys

import torch

from benchmarks.compiler.survey import KINDS, one
from benchmarks.subjects.hugging_face import import_transformers


def part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not 1/2 or its like")
    return int(found[1]), int(found[2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes alone")
    parser.add_argument(
        "--attention",
        choices=("sdpa", "eager"),
        help="by torch, or written out; else as the class has it",
    )
    parser.add_argument(
        "--regions",
        action="store_true",
        help="compare each site with the region of its measurement",
    )
    parser.add_argument("--dynamic", action="store_true", help="with dynamic sizes")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="I/N", help="every Nth class, from the Ith"
    )
    args = parser.parse_args(argv)
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    from transformers.models.auto import configuration_auto, modeling_auto

    counts = collections.Counter()
    for kind in args.kind:
        names = getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES")
        for i, (config, name) in enumerate(sorted(names.items())):
            name = name if isinstance(name, str) else name[0]
            if i % args.part[1] != args.part[0] - 1 or (args.only and name not in args.only):
                continue
            line = one(transformers, kind, configuration_auto.CONFIG_MAPPING[config], name, args)
            counts[re.split("[,:]", line)[0]] += 1
            print(f"{kind} {config}, {name}: {line}", flush=True)
    words = ", ".join(f"{n} {word}" for word, n in counts.items())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {words}")
    return 1 if counts["WRONG"] or counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
