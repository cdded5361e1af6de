"""Where the host's time goes between the caller and the launch, by layer.

    layers = Layers()
    outer = layers.timed("guards", lambda: inner())
    inner = layers.timed("launch", launch)
    outer(); layers.microseconds(calls=1)     # {"guards": 3.1, "launch": 4.2}

A layer's time is its own, without that of the layers that it calls, and without what the timers
take, which is measured beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable


class Layers:
    """Timers that nest. One thread runs at a time: autograd's caller waits for its backward."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.children: Counter[str] = Counter()  # timed calls made by a layer
        self.open: list[list] = []  # of each call that has begun: its layer, its children's time
        self.inside = self.outside = 0.0  # ns that a timer adds to its own layer, to its caller's

    def timed(self, layer: str | Callable[[], str], call: Callable) -> Callable:
        """`call`, its time counted for `layer`, which may be a function that names it."""

        def run(*args, **kwargs):
            name = layer if isinstance(layer, str) else layer()
            children = 0
            if self.open:
                self.children[self.open[-1][0]] += 1
            frame = [name, children]
            self.open.append(frame)
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - start
                self.open.pop()
                self.ns[name] += took - frame[1]
                self.calls[name] += 1
                if self.open:
                    self.open[-1][1] += took

        return run

    def reset(self) -> None:
        for counter in (self.ns, self.calls, self.children):
            counter.clear()

    def calibrate(self, calls: int = 2000, rounds: int = 11) -> None:
        """Measure what a timer costs, around a call that does nothing."""
        nothing = lambda: None  # noqa: E731 (the least that can be called)
        inner = self.timed("inner", nothing)
        outer = self.timed("outer", lambda: [inner() for _ in range(calls)])
        bare = self.timed("bare", lambda: [nothing() for _ in range(calls)])
        inside, outside = [], []
        for _ in range(rounds):
            self.reset()
            outer(), bare()
            inside.append(self.ns["inner"] / calls)
            outside.append((self.ns["outer"] - self.ns["bare"]) / calls)
        self.inside, self.outside = statistics.median(inside), statistics.median(outside)
        self.reset()

    def microseconds(self, calls: int) -> dict[str, float]:
        """Of each layer, its own time in one of so many calls."""
        return {
            name: (
                ns - self.inside * self.calls[name] - self.outside * self.children[name]
            ) / calls / 1e3
            for name, ns in self.ns.items()
        }  # fmt: skip
