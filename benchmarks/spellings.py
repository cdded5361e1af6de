"""How many generated spellings of each pattern are recognised, and that nothing generated comes out wrong.

python -m benchmarks.spellings [--only NAME ...] [--count 40] [--seed 0] [--verbose] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch

from fusion_backend.backend import patterns, usable
from fusion_backend.spelling.recall import Recall, recall

HEADER = (
    f"{'pattern':24}{'spellings':>10}{'recognised':>12}{'not one':>9}{'near misses':>13}{'left alone':>12}{'wrong':>7}"
)


def line(found: Recall) -> str:
    r = found.row()
    share = f"{r['recognised'] / max(r['spellings'], 1):.1%}"
    return (
        f"{r['pattern']:24}{r['spellings']:10}{share:>12}{r['faults']:9}{r['near_misses']:13}{r['left_alone']:12}"
        f"{r['wrong']:7}"
    )


def told(found: Recall) -> str:
    """Everything that is not as it should be, with its source."""
    groups = {"not recognised": found.unrecognised, "wrong": found.wrong, "not a spelling": found.faults}
    lines = [f"    {w}: {k} of {n} not recognised" for w, k, n in found.to_blame()[:8]]
    for title, outcomes in groups.items():
        for o in outcomes:
            lines += [f"--- {title} {o.spelling.kinds} {o.spelling.words} {o.wrong}", o.spelling.source, o.reason]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="patterns to generate for (default: all)")
    parser.add_argument("--count", type=int, default=40, help="spellings, and as many near misses, a pattern")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print the source of what is not as it should be")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows = []
    print(HEADER)
    for pattern in usable(patterns()):
        if args.only and pattern.name not in args.only:
            continue
        torch.compiler.reset()
        found = recall(pattern, count=args.count, seed=args.seed)
        rows.append(found.row() | dict(to_blame=found.to_blame()[:20]))
        print(line(found), flush=True)
        if args.verbose:
            print(told(found), flush=True)
    if args.out:
        about = dict(torch=torch.__version__, count=args.count, seed=args.seed)
        args.out.write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")
    total = {k: sum(r[k] for r in rows) for k in ("spellings", "recognised", "near_misses", "left_alone", "wrong")}
    print(f"{total['recognised'] / max(total['spellings'], 1):.2%} of {total['spellings']} spellings recognised, "
          f"{total['wrong']} of {total['spellings'] + total['near_misses']} functions wrong")  # fmt: skip
    raise SystemExit(bool(total["wrong"]))


if __name__ == "__main__":
    main()
