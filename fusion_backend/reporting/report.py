"""The report: every site with the user's line, the decision and its reason, as text, JSON and log
lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import warnings

from fusion_backend.reporting.records import GraphRecord, Miss, Site

# The most graphs that the report of a process keeps; a training script with changing shapes makes
# new ones for days.
MAX_GRAPHS = 500
MAX_WARNINGS = 1000  # warnings that are remembered, so that none is given twice
# unset or 0: failures only; 1: one line for each site; 2: near misses and timings too
LOG_VARIABLE = "FUSION_LOG"


@dataclasses.dataclass(repr=False)
class Report:
    """What the pass did to the newest 500 graphs of a process, or to all graphs of one `explain`.

    `sites`, `fused` and `misses` cover all graphs. `print(report)` shows one screen,
    `text(verbose=True)` all details, `to_json` the same as JSON and `to_html` a page with the
    model's tree. dropped: how many older graphs were removed. target: the GPU that `explain`
    decided for, instead of the one that is there. modules: the paths and classes of the modules of
    the explained model.

        report = fusion_backend.explain(model, x)
        print([(site.where, site.reason) for site in report.sites])
    """

    graphs: list[GraphRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0
    target: str | None = None
    modules: dict[str, str] = dataclasses.field(default_factory=dict)

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
        """All fields, with those of GraphRecord, Site and Miss."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_html(self) -> str:
        """One self-contained page: the text of the report, and the model's modules as a tree, with
        what was decided at each.
        """
        from fusion_backend.reporting.html import page  # not before a report is shown

        return page(self)

    def text(self, verbose: bool = False, width: int | None = None) -> str:
        """What was fused, what was not and why, grouped by pattern and place.

        verbose: also the sites that overlap others, all near misses, and no grouping of layers.
        width: of a line, in characters; that of the terminal by default, 60 to 100.
        """
        from fusion_backend.reporting.text import terminal_width, text_of

        return text_of(self, verbose, width or terminal_width())

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        from fusion_backend.reporting.text import headline

        return f"<{headline(self)}; print it to see them>"

    def _repr_html_(self) -> str:  # Jupyter shows it
        from fusion_backend.reporting.html import fragment

        return fragment(self)


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


def log_level() -> int:
    value = os.environ.get(LOG_VARIABLE, "0")
    return int(value) if value.isdigit() else 1


def log(record: GraphRecord) -> None:
    """Print the sites of a graph to standard error, in the detail that FUSION_LOG asks for."""
    if log_level() < 1:
        return
    from fusion_backend.reporting.text import with_counts

    shown = [*record.sites, *(record.misses if log_level() > 1 else ())]
    for line, n in with_counts(shown):
        print(f"[fusion] {line}{f'  ×{n}' if n > 1 else ''}", file=sys.stderr)
    if log_level() > 1:
        print(
            f"[fusion] {record.nodes} nodes: capture {record.capture_s:.3f} s, match "
            f"{record.match_s:.3f} s, measure {record.measure_s:.3f} s, "
            f"rewrite {record.rewrite_s:.3f} s{', as decided before' * record.remembered}; "
            f"copied verbatim: {record.copied or 'nothing'}",
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
