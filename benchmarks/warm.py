"""Compile pieces of work ahead, many at once: afterwards a run finds them in Inductor's and
Triton's caches.

`python -m benchmarks.warm` is a helper of benchmarks.patterns: it reads work and names of
contenders from stdin, a JSON line each, and writes "done" or "failed" for each. Processes compile
side by side, but only one at a time may time candidates for max-autotune, whose choices are kept in
the cache too.
"""

from __future__ import annotations

import json
import sys

from benchmarks.pattern_runs.compiling import one_at_a_time, warm
from benchmarks.workloads.work import Work
from fusion_backend.frontends.dynamo import patterns


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
