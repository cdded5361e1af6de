"""The names of small models around one recognised site, as `benchmarks.models --module` takes them.

    python -m benchmarks.models --once --exact none --no-profile --mode infer \\
        --module $(python -m benchmarks.in_place infer) --out FILE.json

For training: --mode train with `in_place train`. For what the default gate leaves to Inductor:
--gate always. The models are in subjects/one_site.py. Results name them as
benchmarks.in_place:NAME, so they are found here, too.
"""

from __future__ import annotations

import argparse

from benchmarks.subjects.one_site import INFERENCE, TRAINING

globals().update(INFERENCE | TRAINING)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.in_place",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("infer", "train"))
    names = {"infer": INFERENCE, "train": TRAINING}[parser.parse_args(argv).mode]
    print(*(f"benchmarks.in_place:{name}" for name in names))


if __name__ == "__main__":
    main()
