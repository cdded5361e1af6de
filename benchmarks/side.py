"""One of the two processes of benchmarks.compare: holds a piece of work of its revision and times
it when told.

Reads requests from stdin and answers on stdout, a JSON line each: {"do": "prepare", "work": ...}
compiles, {"do": "time", "calls": n} times. An answer with "error" says why not.
"""

from __future__ import annotations

import json
import sys

from benchmarks.measure.failures import said
from benchmarks.measure.library import patterns
from benchmarks.pattern_runs.side import Side
from benchmarks.workloads.work import Work


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what compilers print is no answer
    patterns()
    import fusion_backend.patterns as rooms

    side = Side(sys.argv[1])
    print(json.dumps(dict(rooms=rooms.__file__)), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                answer = side.prepare(Work.from_json(request["work"]))
            else:
                answer = side.time(request["calls"])
        except Exception as error:
            answer = dict(error=said(error))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
