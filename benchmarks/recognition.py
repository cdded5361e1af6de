"""What is recognised in whole models of transformers, against what their sources hold.

    python -m benchmarks.recognition [MODEL ...] [--out docs/recognition.md]

The models are small and have random weights. What is expected was counted in their sources, for
each layer and outside of the layers. What is found are the sites of the patterns of a kind, fused
or not: a value counts once, even where it is part of a larger pattern, and once for every call of
its graph. --out writes the section of the installed release of transformers and leaves the others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
from pathlib import Path

import torch

from benchmarks.compiler.recognition import SETTINGS, found
from benchmarks.compiler.recognition_page import cell, page, release, section, sections_of
from benchmarks.subjects.whole_models import SUBJECTS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recognition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"some of {', '.join(SUBJECTS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("needs transformers: pip install -e '.[bench]'")
    if unknown := [name for name in args.models if name not in SUBJECTS]:
        parser.error(f"no model {', '.join(unknown)}; there is {'; '.join(SUBJECTS)}")
    logging.getLogger("torch").setLevel(logging.ERROR)
    counts = {}
    for name in args.models or SUBJECTS:
        for setting in SETTINGS:
            counts[name, setting] = found(SUBJECTS[name], SETTINGS[setting])
            print(f"{name}, {setting}: {cell(name, counts[name, setting])}", flush=True)
    title = f"transformers {release()}, torch {torch.__version__.split('+')[0]}"
    if args.out:
        before = sections_of(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(page(before | {title: section(counts)}))


if __name__ == "__main__":
    main()
