"""One of the two processes of benchmarks.compare: holds a piece of work of its revision and times
it when told.

Reads requests from stdin and answers on stdout, a JSON line each: {"do": "prepare", "work": ...}
compiles, {"do": "time", "calls": n} times. An answer with "error" says why not.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch

from benchmarks.contenders import HOW, compiled, results_of, step
from benchmarks.measure import said
from benchmarks.timing import Clock
from benchmarks.work import Work
from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.registry import RULES


class Side:
    """`how` is the contender of benchmarks.patterns that is timed."""

    def __init__(self, how: str):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock, self.how = Clock(self.device), how

    def prepare(self, work: Work) -> dict:
        if work.pattern not in RULES:
            return dict(missing=True)
        torch.compiler.reset()
        torch.manual_seed(0)
        self.work, self.fn = work, compiled(HOW[self.how])(work.function)
        with torch.set_grad_enabled(work.train):
            args = work.arguments(self.device)
            outs = results_of(self.fn, args)
            self.dys = [torch.randn_like(out) for out in outs] if work.train else None
            step(self.fn, args, self.dys)
            return dict(
                ms=statistics.median(
                    self.clock(lambda: step(self.fn, args, self.dys)) for _ in range(5)
                )
            )

    def time(self, calls: int) -> dict:
        """Fresh arguments; the first call is not counted, for the GPU was the other side's."""
        with torch.set_grad_enabled(self.work.train):
            args = self.work.arguments(self.device)
            found = [self.clock(lambda: step(self.fn, args, self.dys)) for _ in range(calls + 1)]
        return dict(ms=found[1:])


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
