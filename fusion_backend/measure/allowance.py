"""The seconds that may be spent on measuring: those of the process, and those of one graph."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

from fusion_backend.decide.gate import Gate
from fusion_backend.options import Options

# When this part of fusion.measure_s has been spent on a graph, no other class of it is measured.
# From this number of nodes on it is all of it. Both without gradients, and in training. Inductor's
# own time grows with the nodes, and measuring should take less than half of it. On the host of an
# H100 Inductor compiled models of 300 to 1,000 nodes in 8 to 19 s for inference, and in 19 to 59 s
# for training (benchmarks.models, cold).
PART, ALL_OF_IT = (0.25, 0.5), (7000, 1700)


class Allowance:
    """The seconds that this process has spent on measuring, for all graphs together."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.lock = threading.Lock()

    def left(self, options: Options, of_graph: float = float("inf")) -> float:
        """The seconds that are left to measure a class; 0 if they are too few for one like the
        earlier ones, or if none of those for its graph are left.
        """
        if options.gate == "measure":
            return float("inf")
        left = options.measure_s - sum(self.took)
        enough = of_graph > 0 and left > statistics.median(self.took or [0.0])
        return left if enough else 0.0

    def part_left(self, options: Options, part: float) -> float:
        """The seconds that are left of this part of the time."""
        if options.gate == "measure":
            return float("inf")
        return part * options.measure_s - sum(self.took)

    def spend(self, seconds: float) -> None:
        with self.lock:
            self.took.append(seconds)


ALLOWANCE = Allowance()


def seconds_for(gates: Sequence[Gate], options: Options) -> float:
    """The seconds of fusion.measure_s for one graph, which several gates share."""
    nodes = sum(n.op == "call_function" for g in gates for n in g.facts.view.graph.nodes)
    trains = any(g.facts.training(d.match) for g in gates for d in g.found)
    return options.measure_s * min(1.0, max(PART[trains], nodes / ALL_OF_IT[trains]))
