"""The report: every site with the user's line, the decision and its reason, as text, JSON and log
lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable

from torch import fx

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
INSIDE_TORCH = re.compile(r"[/\\]torch[/\\](nn|_|functional|utils|ao|func|amp)")
# How many graphs the report of a process has at most; a training script with changing shapes makes
# new ones for days.
MAX_GRAPHS = 500
MAX_WARNINGS = 1000  # that are remembered, so that none is given twice
# unset or 0: failures only; 1: one line for each site; 2: near misses and timings too
LOG_VARIABLE = "FUSION_LOG"


@dataclasses.dataclass
class Site:
    """A part of a graph that a pattern matches, and the decision about it.

    pattern: its name. where: the user's file:line. fused, reason: the decision, and a sentence that
    gives its reason. forward, backward: the providers of a fused site, such as "kernel",
    "reference", "library", "formula" or "vjp". bytes_saved: memory traffic that the kernel avoids,
    where the pattern can say. nodes: names of the nodes in the view. covered: a larger site that is
    fused has these nodes, so that this one is not counted.

        print([site.reason for site in fusion_backend.report().sites if not site.fused])
    """

    pattern: str
    where: str
    fused: bool
    reason: str
    forward: str | None = None
    backward: str | None = None
    bytes_saved: int | None = None
    nodes: tuple[str, ...] = ()
    covered: bool = False

    def __str__(self) -> str:
        if self.fused:
            how = f"forward {self.forward}" + (
                f", backward {self.backward}" if self.backward else ""
            )
            saved = f", saves {readable(self.bytes_saved)}" if self.bytes_saved else ""
            why = f" ({self.reason})" if self.reason else ""
            return f"fused      {self.pattern:14} {self.where}  {how}{saved}{why}"
        return f"not fused  {self.pattern:14} {self.where}  {self.reason}"


@dataclasses.dataclass
class Miss:
    """A part of a graph that a pattern nearly matches: `matched` of its `size` operators."""

    pattern: str
    where: str
    matched: int
    size: int
    reason: str

    def __str__(self) -> str:
        how_far = f"{self.matched} of {self.size} operators matched, then {self.reason}"
        return f"near miss  {self.pattern:14} {self.where}  {how_far}"


@dataclasses.dataclass(frozen=True)
class RuleCount:
    """How often a rule was tried at a node of a graph, how often it matched, and the seconds that
    took.
    """

    tried: int = 0
    matched: int = 0
    seconds: float = 0.0

    def plus(self, other: RuleCount) -> RuleCount:
        seconds = self.seconds + other.seconds
        return RuleCount(self.tried + other.tried, self.matched + other.matched, seconds)


@dataclasses.dataclass(eq=False)  # two graphs may have equal records
class GraphRecord:
    """One graph of Dynamo's: the seconds that its passes took, its sites and near misses.

    error: why the graph went to Inductor unchanged. backward_error: why its backward runs operator
    by operator. copied: each node that the view copies verbatim, and why. faults: exceptions in our
    rules and in patterns, each of which costs one site.
    """

    nodes: int
    capture_s: float = 0.0
    match_s: float = 0.0
    rewrite_s: float = 0.0
    error: str | None = None
    backward_error: str | None = None
    copied: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: list[Site] = dataclasses.field(default_factory=list)
    misses: list[Miss] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    rules: dict[str, RuleCount] = dataclasses.field(default_factory=dict, repr=False)

    def rules_table(self) -> str:
        """A line a rule: tried, matched, fused, milliseconds; the dearest first."""
        fused = [s.pattern for s in self.sites if s.fused]
        lines = ["rule                      tried  matched  fused       ms"]
        for name, c in sorted(self.rules.items(), key=lambda item: -item[1].seconds):
            row = f"{name:24} {c.tried:6} {c.matched:8} {fused.count(name):6}"
            lines.append(f"{row} {c.seconds * 1e3:8.2f}")
        return "\n".join(lines) + "\n"


@dataclasses.dataclass
class Report:
    """What the pass did to the newest 500 graphs of a process, or to all graphs of one `explain`.

    `sites`, `fused` and `misses` go through all graphs; `str` gives lines of text and `to_json` the
    same as JSON. dropped: how many older graphs were removed.

        report = fusion_backend.explain(model, x)
        print([(site.where, site.reason) for site in report.sites])
    """

    graphs: list[GraphRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0

    @property
    def sites(self) -> list[Site]:
        return [s for g in self.graphs for s in g.sites]

    @property
    def misses(self) -> list[Miss]:
        return [m for g in self.graphs for m in g.misses]

    @property
    def fused(self) -> list[Site]:
        return [s for s in self.sites if s.fused]

    def to_json(self) -> str:
        """The graphs with all fields of GraphRecord, Site and Miss."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        graphs = f"{len(self.graphs)} graph{'' if len(self.graphs) == 1 else 's'}"
        counted = sum(not s.covered for s in self.sites)
        lines = [f"fusion: {len(self.fused)} of {counted} recognised sites fused in {graphs}"]
        lines += [
            f"  {line}{f'  ×{n}' if n > 1 else ''}"
            for line, n in with_counts([*self.sites, *self.misses])
        ]
        lines += [f"  failed     {fault}" for g in self.graphs for fault in g.faults]
        for i, g in enumerate(self.graphs):
            if g.error:
                lines.append(f"  graph {i} went to Inductor as it was: {g.error}")
            if g.backward_error:
                lines.append(
                    f"  graph {i} runs its backward operator by operator: {g.backward_error}"
                )
        if self.dropped:
            lines.append(f"  {self.dropped} older graphs were dropped from the report")
        return "\n".join(lines)


def with_counts(entries: Iterable[Site | Miss]) -> list[tuple[str, int]]:
    """Each distinct line with its number, in order of first appearance."""
    counts: dict[str, int] = {}
    for e in entries:
        counts[str(e)] = counts.get(str(e), 0) + 1
    return list(counts.items())


REPORT = Report()
WARNED: dict[str, None] = {}  # an ordered set of the keys of `warn_once`
LOCK = threading.Lock()  # for REPORT and WARNED


def report() -> Report:
    """The report of this process, on its newest 500 graphs. A compilation that Inductor takes from
    its cache counts too: the pass runs whenever Dynamo does.

        print(fusion_backend.report())
    """
    return REPORT


def reset() -> None:
    """Empty the report of this process, and give warnings anew."""
    with LOCK:
        REPORT.graphs.clear()
        REPORT.dropped = 0
        WARNED.clear()


def add(record: GraphRecord) -> None:
    """Add a graph to the report of the process, and remove the oldest where there are too many."""
    with LOCK:
        REPORT.graphs.append(record)
        surplus = len(REPORT.graphs) - MAX_GRAPHS
        if surplus > 0:
            del REPORT.graphs[:surplus]
            REPORT.dropped += surplus


def take_back(record: GraphRecord) -> None:
    """Remove a graph that Dynamo will compile again."""
    with LOCK:
        if record in REPORT.graphs:
            REPORT.graphs.remove(record)


def readable(n: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return ""


def location(node: fx.Node) -> str:
    """The user's file:line that a node comes from: the innermost frame outside torch."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    users = [f for f in frames if not INSIDE_TORCH.search(f[0])] or frames
    return f"{users[-1][0]}:{users[-1][1]}" if users else f"node {node.name}"


def log_level() -> int:
    value = os.environ.get(LOG_VARIABLE, "0")
    return int(value) if value.isdigit() else 1


def log(record: GraphRecord) -> None:
    """Print the sites of a graph to standard error, as far as FUSION_LOG asks for it."""
    if log_level() < 1:
        return
    shown = [*record.sites, *(record.misses if log_level() > 1 else ())]
    for line, n in with_counts(shown):
        print(f"[fusion] {line}{f'  ×{n}' if n > 1 else ''}", file=sys.stderr)
    if log_level() > 1:
        print(
            f"[fusion] {record.nodes} nodes: capture {record.capture_s:.3f} s, match "
            f"{record.match_s:.3f} s, "
            f"rewrite {record.rewrite_s:.3f} s; copied verbatim: {record.copied or 'nothing'}",
            file=sys.stderr,
        )


def warn_once(key: str, message: str) -> None:
    """Give a RuntimeWarning unless one of the same key was given before."""
    with LOCK:
        if key in WARNED:
            return
        WARNED[key] = None
        if len(WARNED) > MAX_WARNINGS:
            del WARNED[next(iter(WARNED))]
    warnings.warn(message, RuntimeWarning, stacklevel=2)
