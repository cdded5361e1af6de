"""Decisions and near misses -> the rows of a report."""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from fusion_backend.capture.view import name_of
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import peel
from fusion_backend.match.matcher import Matcher, Mismatch
from fusion_backend.ops.op import Op
from fusion_backend.reporting.places import location, module_of
from fusion_backend.reporting.records import (
    COVERED,
    FAILED,
    ILLEGAL,
    NO_GPU,
    NO_KERNEL,
    SWITCHED_OFF,
    UNPROFITABLE,
    UNSUPPORTED,
    GraphRecord,
    Miss,
    Site,
)
from fusion_backend.reporting.report import warn_once

# Of several overlapping sites the report shows the one whose cause comes first here; None is fused.
RANKS = (None, NO_GPU, UNPROFITABLE, UNSUPPORTED, FAILED, SWITCHED_OFF, ILLEGAL, NO_KERNEL)


def best_answers(decisions: list[Decision]) -> list[Decision]:
    """One decision for each rule and root: the fused one, or else the first refusal (that of the
    largest template).
    """
    best: dict[tuple, Decision] = {}
    for d in decisions:
        key = (d.match.pattern.name, d.match.roots[0])
        if key not in best or (d.fused and not best[key].fused):
            best[key] = d
    return list(best.values())


def mark_alternatives(decisions: list[Decision], gate: Gate) -> None:
    """If refused sites share an operator with a fused one, or with each other, only one is counted.
    Sites with a kernel come before those without, otherwise the order of the decisions holds. A
    site that is not counted does not hide others.
    """
    taken: set[fx.Node] = set()
    for d in sorted((d for d in decisions if d.cause != COVERED), key=rank):
        own = {*gate.legality.costly(d.match)}
        d.alternative = bool(own & taken) and not d.fused
        if not d.alternative:
            taken |= own


def rank(d: Decision) -> int:
    rule = d.match.pattern
    kernel = rule.replacement_fn or not isinstance(rule, Op) or rule.kernel_fn
    return RANKS.index(d.cause if d.fused or kernel else NO_KERNEL)


def site(d: Decision, order: dict[fx.Node, int], path: str = "") -> Site:
    """A row for one decision. `path` says in which body it is, because node names repeat between
    bodies.
    """
    m = d.match
    if d.failure:
        told = f"fusion: {m.pattern.where}: {d.failure}; its sites are left to Inductor"
        warn_once(f"kernel {m.pattern.name}", told)
    nodes = tuple(path + n.name for n in (*m.interior, *m.roots))
    decided = (d.fused, d.reason, d.forward, d.backward, d.bytes_saved)
    return Site(
        m.pattern.name,
        location(m.roots[0]),
        *decided,
        nodes,
        covered=d.cause == COVERED,
        module=next(filter(None, map(module_of, (*m.roots, *reversed(m.interior)))), ""),
        cause=d.cause,
        alternative=d.alternative,
        position=order[m.roots[0]],
    )


def near_misses(matcher: Matcher, gate: Gate, decisions: list[Decision]) -> list[Miss]:
    """The best partial match of each rule on each source line, if it covers at least half of the
    rule and lies outside all fused sites.
    """
    inside = {n for d in decisions for n in (*d.match.interior, *d.match.roots)}
    best: dict[tuple[str, str], Mismatch] = {}
    for m in matcher.misses.values():
        key = (m.pattern.name, location(m.root))
        if m.root in gate.claims.computed or matcher.covered(m):
            continue
        if key not in best or m.rank > best[key].rank:
            best[key] = m
    return [
        Miss(
            name,
            where,
            m.matched,
            m.size,
            f"{m.reason} at {location(m.node)}",
            module_of(m.root),
            inside=m.root in inside or not inside.isdisjoint(peel(gate.canon.of[m.root]).nodes),
        )
        for (name, where), m in best.items()
    ]


def count_operators(record: GraphRecord, graph: fx.Graph) -> None:
    """Add the operators of a view to those of its graph."""
    called = (
        n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    )
    names = Counter(name_of(n).removeprefix("aten::") for n in called)
    record.operators = dict(Counter(record.operators) + names)


def note_faults(record: GraphRecord, canon: Canon, matcher: Matcher) -> None:
    """Add the faults that happened before there was a site. Each costs one canonical rule at one
    node, or one place to match, and not the graph.
    """
    for n, fault in (*canon.faults.items(), *matcher.faults.items()):
        record.faults.append(f"{fault}, at {location(n)}")
        warn_once(f"fault {fault}", f"fusion: {record.faults[-1]}; please report this")
