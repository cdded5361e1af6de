"""What happened: every site with the user's line, the decision and its reason, as text, JSON and
log lines.
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
# graphs in the report of a process, the newest; a training script with changing shapes makes them
# for days
KEPT = 500
WARNINGS = 1000  # that are remembered, so as not to be given again
# unset or 0: failures only; 1: a line a site; 2: nearest misses and timings too
LOG_VARIABLE = "FUSION_LOG"


@dataclasses.dataclass
class Site:
    """A place where a pattern was recognised."""

    pattern: str
    where: str
    fused: bool
    reason: str
    forward: str | None = None
    backward: str | None = None
    bytes_saved: int | None = None
    nodes: tuple[str, ...] = ()
    covered: bool = False  # by a larger site that is fused

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
    """A place where a pattern nearly stood."""

    pattern: str
    where: str
    matched: int
    size: int
    reason: str

    def __str__(self) -> str:
        how_far = f"{self.matched} of {self.size} operators matched, then {self.reason}"
        return f"near miss  {self.pattern:14} {self.where}  {how_far}"


@dataclasses.dataclass(eq=False)  # two graphs may have equal records
class GraphRecord:
    """One graph that Dynamo handed over.

    `error` says why it went to Inductor as it was, `backward_error` why its backward runs operator
    by operator.
    """

    nodes: int
    capture_s: float = 0.0
    match_s: float = 0.0
    rewrite_s: float = 0.0
    error: str | None = None
    backward_error: str | None = None
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    sites: list[Site] = dataclasses.field(default_factory=list)
    misses: list[Miss] = dataclasses.field(default_factory=list)
    # of ours; each costs the place where it was
    faults: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """The newest graphs of a process, or all those of one `explain`."""

    graphs: list[GraphRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0  # older graphs that are no longer kept

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
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        graphs = f"{len(self.graphs)} graph{'' if len(self.graphs) == 1 else 's'}"
        places = sum(not s.covered for s in self.sites)
        lines = [f"fusion: {len(self.fused)} of {places} recognised sites fused in {graphs}"]
        lines += [
            f"  {line}{f'  ×{n}' if n > 1 else ''}"
            for line, n in counted([*self.sites, *self.misses])
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
            lines.append(f"  {self.dropped} older graphs are no longer kept")
        return "\n".join(lines)


def counted(entries: Iterable[Site | Miss]) -> list[tuple[str, int]]:
    """Equal lines once, with their number, in order of first appearance."""
    counts: dict[str, int] = {}
    for e in entries:
        counts[str(e)] = counts.get(str(e), 0) + 1
    return list(counts.items())


REPORT = Report()
WARNED: dict[str, None] = {}  # in order
LOCK = threading.Lock()  # for both


def report() -> Report:
    """What was compiled in this process, the newest 500 graphs. Cached compilations count: the pass
    runs whenever Dynamo does.
    """
    return REPORT


def reset() -> None:
    """Empty the report."""
    with LOCK:
        REPORT.graphs.clear()
        REPORT.dropped = 0
        WARNED.clear()


def add(record: GraphRecord) -> None:
    """Take a graph into the report of the process; the oldest makes room."""
    with LOCK:
        REPORT.graphs.append(record)
        surplus = len(REPORT.graphs) - KEPT
        if surplus > 0:
            del REPORT.graphs[:surplus]
            REPORT.dropped += surplus


def take_back(record: GraphRecord) -> None:
    """Forget a graph that Dynamo will hand over again."""
    with LOCK:
        if record in REPORT.graphs:
            REPORT.graphs.remove(record)


def readable(n: float) -> str:
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
    if log_level() < 1:
        return
    shown = [*record.sites, *(record.misses if log_level() > 1 else ())]
    for line, n in counted(shown):
        print(f"[fusion] {line}{f'  ×{n}' if n > 1 else ''}", file=sys.stderr)
    if log_level() > 1:
        print(
            f"[fusion] {record.nodes} nodes: capture {record.capture_s:.3f} s, "
            f"match {record.match_s:.3f} s, rewrite {record.rewrite_s:.3f} s; "
            f"copied verbatim: {record.kept or 'nothing'}",
            file=sys.stderr,
        )


def warn_once(key: str, message: str) -> None:
    with LOCK:
        if key in WARNED:
            return
        WARNED[key] = None
        if len(WARNED) > WARNINGS:
            del WARNED[next(iter(WARNED))]
    warnings.warn(message, RuntimeWarning, stacklevel=2)
