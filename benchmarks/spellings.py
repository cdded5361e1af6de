"""How many generated spellings of each pattern are recognised, and whether any comes out wrong.

    python -m benchmarks.spellings [--only NAME ...] [--count 40] [--seed 0] [--verbose]
        [--out FILE.json]

Every other function runs under no_grad, and the rest with gradients where eager can differentiate
them. The table in docs/catalogue.md comes from benchmarks/results/spellings.json. Exit status: 1
when a function came out wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch

from benchmarks.compiler.spellings import HEADER, failures, line
from benchmarks.records.runs import table_json
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.testing.spelling.recall import recall


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spellings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="patterns to generate for (default: all)"
    )
    parser.add_argument(
        "--count",
        type=int,
        default=40,
        help="spellings of each pattern, and as many near misses (default: 40)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print the source of each function that was not found, or came out wrong",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    # a rule by itself sums over ranks, of which there are none here
    rules = [p for p in usable(patterns()) if hasattr(p, "kernel_fn")]
    rows, there = [], {pattern.name: pattern for pattern in rules}
    if unknown := sorted({*args.only} - there.keys()) if args.only else []:
        parser.error(f"no pattern {', '.join(unknown)}; there is {', '.join(there)}")
    print(HEADER)
    for pattern in (there[name] for name in there if not args.only or name in args.only):
        torch.compiler.reset()
        found = recall(pattern, count=args.count, seed=args.seed)
        rows.append(found.row() | dict(to_blame=found.to_blame()[:20]))
        print(line(found), flush=True)
        if args.verbose:
            print(failures(found), flush=True)
    if args.out:
        command = " ".join(["python -m benchmarks.spellings", *sys.argv[1:]])
        about = dict(torch=torch.__version__, command=command, count=args.count, seed=args.seed)
        args.out.write_text(table_json(about, "rows", rows))
    total = {k: sum(r[k] for r in rows) for k in rows[0] if k not in ("pattern", "to_blame")}
    for mode in ("training", "inference"):
        print(f"{mode}: {total[f'recognised_in_{mode}']} of {total[mode]} spellings recognised")
    share = total["recognised"] / max(total["spellings"], 1)
    print(
        f"{share:.2%} of {total['spellings']} spellings recognised, "
        f"{total['wrong']} of {total['functions']} functions wrong"
    )
    raise SystemExit(bool(total["wrong"]))


if __name__ == "__main__":
    main()
