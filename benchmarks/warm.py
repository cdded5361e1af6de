"""A process that compiles pieces of work ahead for benchmarks.patterns.

It reads a piece of work and names of contenders from stdin, a JSON line each, and writes "done" or
"failed" for each (pattern_runs/compiling.py).
"""

from __future__ import annotations

import json
import sys

from benchmarks.pattern_runs.compiling import one_at_a_time, warm
from benchmarks.workloads.work import Work
from fusion_backend.frontends.loading import patterns


def main() -> None:
    patterns()
    one_at_a_time()
    answers, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no answer
    for line in sys.stdin:
        try:
            work, names = json.loads(line)
            warm(Work.from_json(work), names)
            answer = "done"
        except Exception as error:  # the run itself will say so
            print(f"{line.strip()}: {error}", file=sys.stderr)
            answer = "failed"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
