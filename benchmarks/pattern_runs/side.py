"""One of the two processes of benchmarks.compare, seen from within."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import TextIO

import torch

from benchmarks.measure.failures import said
from benchmarks.measure.library import FUSION_RULES, fusion, patterns
from benchmarks.measure.timing import Clock
from benchmarks.pattern_runs.contenders import HOW, compiled, gradients_for, results_of, step
from benchmarks.workloads.work import Work


class Side:
    """`how` is the contender of benchmarks.patterns that is timed."""

    def __init__(self, how: str):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock, self.how = Clock(self.device), dict(HOW[how])
        # The entry point of the name "fusion" is that of the installed revision.
        if self.how.get("backend") == "fusion":
            self.how["backend"] = fusion

    def prepare(self, work: Work) -> dict:
        if work.pattern not in FUSION_RULES:
            return dict(missing=True)
        torch.compiler.reset()
        torch.manual_seed(0)
        self.work, self.fn = work, compiled(self.how)(work.function)
        with torch.set_grad_enabled(work.train):
            args = work.arguments(self.device)
            outs = results_of(self.fn, args)
            self.dys = gradients_for(outs) if work.train else None
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


def serve(how: str, requests: Iterable[str], answers: TextIO) -> None:
    """Answer requests, a line each, until they end; benchmarks.side says what they are."""
    patterns()
    import fusion_backend.patterns as built_in

    side = Side(how)
    print(json.dumps(dict(patterns=built_in.__file__)), file=answers, flush=True)
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                answer = side.prepare(Work.from_json(request["work"]))
            else:
                answer = side.time(request["calls"])
        except Exception as error:
            answer = dict(error=said(error))
        print(json.dumps(answer), file=answers, flush=True)
