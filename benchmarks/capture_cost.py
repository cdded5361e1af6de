"""What the pass costs: milliseconds for each graph node to capture, match and rewrite, on six small
models of Hugging Face.

    python -m benchmarks.capture_cost [--runs 7] [--dynamic] [--json FILE]

The figures are CPU time, which leaves out what else the machine does: the least of several runs
after a first one, in which the patterns are traced. Sites are rewritten wherever that is possible
(fusion.gate=always), so that the rewrite counts. Inductor does not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch

from benchmarks.compiler.capture import PHASES, once
from benchmarks.subjects.tiny_models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=7, help="default: 7")
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("needs transformers: pip install -e '.[bench]'")
    rows = []
    print(f"{'ms a node':<20}{'nodes':>8}{'capture':>10}{'match':>10}{'rewrite':>10}{'sum':>10}")
    for name, tiny in MODELS.items():
        for train in (False, True):
            once(tiny, train, arguments.dynamic)
            runs = [once(tiny, train, arguments.dynamic) for _ in range(arguments.runs)]
            row = min(runs, key=lambda run: run["sum"])
            kind = "training" if train else "inference"
            print(
                f"{name + ' ' + kind:<20}{row['nodes']:>8}"
                + "".join(f"{row[k]:>10.3f}" for k in (*PHASES, "sum"))
            )
            rows.append(dict(model=name, kind=kind, dynamic=arguments.dynamic, **row))
    if arguments.json:
        arguments.json.write_text(
            json.dumps(dict(torch=torch.__version__, rows=rows), indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
