"""The table of configurations that kernels look up, from the sweeps that measured them.

    python -m benchmarks.sweep softmax l2_norm ... --out FILE.json      # on a GPU
    python -m benchmarks.tune FILE.json ...

This writes fusion_backend/kernels/common/tuned.py: the fastest configuration of each row kernel for
each row length, and the fastest tile of each matrix product for each size of its weight. `--check`
writes nothing, and exits with 1 where the table is not what the files give. The default is the
files of the committed sweeps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.configurations.fastest import SWEEPS, TABLE, fastest, fastest_tiles, written
from benchmarks.records.runs import Run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, default=SWEEPS, metavar="FILE.json")
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args(argv)
    runs = [Run.load(f) for f in args.files]
    if wrong := [str(f) for f, run in zip(args.files, runs, strict=True) if run.kind != "sweep"]:
        parser.error(f"not results of benchmarks.sweep: {', '.join(wrong)}")
    text = written(runs, args.files)
    if args.check:
        same = TABLE.read_text() == text
        print("the table is " + ("" if same else "not ") + "what the sweeps give")
        return 0 if same else 1
    TABLE.write_text(text)
    found = sum(map(len, fastest(runs).values())) + len(fastest_tiles(runs))
    print(f"wrote {TABLE}: {found} configurations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
