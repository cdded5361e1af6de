"""The committed timings of a pattern, if the package is an editable install of a checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200.json"
FOUND = "benchmarks/results/h200.json"


class Timed(NamedTuple):
    """A row of the results: plain Inductor's time divided by ours, and why the gate left the site
    to Inductor, "" if it did not.
    """

    work: str
    ratio: float
    declined: str


def timed(pattern: str) -> list[Timed] | None:
    """The rows in which both ran and were right; None if the results are not available."""
    if not RESULTS.exists():
        return None
    found = []
    for row in json.loads(RESULTS.read_text())["rows"]:
        ran = {c["name"]: c for c in row["contenders"] if c["status"] == "ok" and c["kernel"]}
        if row["pattern"] == pattern and {"inductor", "fusion"} <= set(ran):
            plain, ours = (ran[name]["kernel"]["median"] for name in ("inductor", "fusion"))
            found.append(Timed(row["name"], plain / ours, ran["fusion"]["declined"]))
    return found


def about() -> str:
    """The GPU, the version and the date of the timings."""
    known = json.loads(RESULTS.read_text())
    return f"{known['gpu']}, torch {known['torch']}, {known['date']}, {FOUND}"
