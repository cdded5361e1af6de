"""What was measured of one graph, as a row of the run's file.

Times are milliseconds where their names do not say seconds, sizes bytes.
"""

from __future__ import annotations

import dataclasses

from benchmarks.foreign_code.problems import Graph
from benchmarks.foreign_runs.steps import FUSION, TWINS
from benchmarks.records.rows import OK, Spread

# Status of a row, besides those of a contender and of a lost process: Inductor itself failed, so
# that there is nothing to compare with.
NO_BASELINE = "no baseline"


@dataclasses.dataclass
class Side:
    """What one contender did. `compile_s` is the first call less a later one, without waiting for
    the GPU (`waited_s`); fusion's is short where it found Inductor's code in a cache. The errors
    are the largest |got - exact| / |exact| of any output and of any gradient.
    """

    name: str
    status: str = OK
    note: str = ""
    kernel: Spread | None = None  # device time of a call, L2 flushed before it
    call: Spread | None = None  # wall time of a call, host included
    compile_s: float | None = None
    waited_s: float | None = None
    peak_bytes: int | None = None
    output_error: float | None = None
    gradient_error: float | None = None


@dataclasses.dataclass
class GraphRow:
    """One graph. `verdict` is "faster" or "slower" than plain Inductor beyond the noise, or "".
    accepted, declined: sites by pattern and reason, with their count.
    """

    name: str
    problem: str
    family: str
    source: str
    mode: str
    dtype: str
    status: str = OK
    note: str = ""
    verdict: str = ""
    # Inductor's median device time over ours, of the faster twin of either
    ratio: float | None = None
    call_ratio: float | None = None  # the same of the wall time
    noise: float | None = None  # |a - b| / b of the medians of Inductor and its twin
    accepted: list[dict] = dataclasses.field(default_factory=list)
    declined: list[dict] = dataclasses.field(default_factory=list)
    sides: list[Side] = dataclasses.field(default_factory=list)
    exact: str | None = None  # the dtype that errors are against
    seconds: float | None = None  # that its process took

    @classmethod
    def of_graph(cls, graph: Graph, status: str = OK, note: str = "") -> GraphRow:
        p = graph.problem
        return cls(graph.name, p.name, p.family, p.source, graph.mode, graph.dtype, status, note)

    @classmethod
    def of_json(cls, row: dict) -> GraphRow:
        sides = [
            Side(**side | {k: Spread(**side[k]) for k in ("kernel", "call") if side[k]})
            for side in row["sides"]
        ]
        return cls(**row | dict(sides=sides))

    def side(self, name: str) -> Side | None:
        return next((side for side in self.sides if side.name == name), None)

    def best(self, name: str, what: str = "kernel") -> Spread:
        """The device time (or wall time, "call") of a contender or of its twin, whichever has the
        lower median. In files of earlier versions fusion has no twin, and none counts.
        """
        names = (name, TWINS[name]) if self.side(TWINS[FUSION]) else (name,)
        return min((getattr(self.side(one), what) for one in names), key=lambda s: s.median)

    @property
    def sites(self) -> int:
        return sum(site["count"] for site in self.accepted)
