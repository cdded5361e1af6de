"""Are the answers that ship about the code that ships? If not, their keys can be computed anew.

    python -m benchmarks.rekey            # the answers about other code
    python -m benchmarks.rekey --write    # their keys and digests, computed anew

An answer is found by a digest of its region, the GPU, the versions, and the files of the patterns
and kernels that it is about. A change in one of these files makes the answer stale, even if the
kernels that were timed are the same: a docstring, or an argument that these kernels do not get.
Whoever writes says that they are the same. In any other case the answers must be measured again
(docs/gate.md). Exit status: 0; 1 where an answer is about other code and --write was not given.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from fusion_backend.frontends.loading import patterns
from fusion_backend.measure.key import code_of_each, key_of
from fusion_backend.measure.store import SEED, Answer, seed, write_answers
from fusion_backend.ops.registry import named


def with_new_key(answer: Answer) -> Answer:
    """The answer, about the code of this checkout."""
    ops = [named(name) for name in answer.about["code"]]
    where = {name: answer.about[name] for name in ("gpu", "torch", "triton")}
    about = answer.about | {"code": code_of_each(ops)}
    key = key_of(answer.about["region"], ops, where)
    return dataclasses.replace(answer, key=key, about=about)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rekey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the new keys to the package")
    args = parser.parse_args(argv)
    patterns()
    old = [*seed().values()]
    new = [with_new_key(answer) for answer in old]
    stale = [a for a, b in zip(old, new, strict=True) if a != b]
    for a in stale:
        print(f"{a.key}: {', '.join(a.sites)} on {a.about['gpu']}, measured on {a.date}")
    print(f"{len(stale)} of {len(old)} answers are about other code")
    if args.write:
        write_answers(SEED, new)
    return 1 if stale and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
