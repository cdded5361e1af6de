"""Decisions and near misses -> the rows of a report."""

from __future__ import annotations

from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.match.matcher import Matcher, Mismatch
from fusion_backend.reporting.report import GraphRecord, Miss, Site, location, warn_once


def best_answers(decisions: list[Decision]) -> list[Decision]:
    """One decision a rule and root: the fused one, else the first refusal (of the largest
    template).
    """
    best: dict[tuple, Decision] = {}
    for d in decisions:
        key = (d.match.pattern.name, d.match.roots[0])
        if key not in best or (d.fused and not best[key].fused):
            best[key] = d
    return list(best.values())


def site(d: Decision, path: str = "") -> Site:
    """A row for one decision. `path` leads to a body: bodies of a graph share names of nodes."""
    m = d.match
    if d.failure:
        told = f"fusion: {m.pattern.where}: {d.failure}; its sites are left to Inductor"
        warn_once(f"kernel {m.pattern.name}", told)
    nodes = tuple(path + n.name for n in (*m.interior, *m.roots))
    decided = (d.fused, d.reason, d.forward, d.backward, d.bytes_saved)
    return Site(m.pattern.name, location(m.roots[0]), *decided, nodes, d.covered)


def near_misses(matcher: Matcher, gate: Gate) -> list[Miss]:
    """The best partial match of a rule on each source line, at least half of it, outside of what
    was fused.
    """
    best: dict[tuple[str, str], Mismatch] = {}
    for m in matcher.misses.values():
        key = (m.pattern.name, location(m.root))
        if m.root in gate.claimed or matcher.covered(m):
            continue
        if key not in best or m.rank > best[key].rank:
            best[key] = m
    return [
        Miss(name, where, m.matched, m.size, f"{m.reason} at {location(m.node)}")
        for (name, where), m in best.items()
    ]


def note_faults(record: GraphRecord, canon: Canon, matcher: Matcher) -> None:
    """What failed before there was a site: it costs a canonical rule at one node, or a place to
    match, and not the graph.
    """
    for n, fault in (*canon.faults.items(), *matcher.faults.items()):
        record.faults.append(f"{fault}, at {location(n)}")
        warn_once(f"fault {fault}", f"fusion: {record.faults[-1]}; please report this")
