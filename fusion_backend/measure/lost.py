"""Proposals inside a larger match that was measured and lost."""

from __future__ import annotations

from torch import fx

from fusion_backend.capture.view import name_of
from fusion_backend.decide.evidence import Measured
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.decide.neighbours import elementwise, library_call
from fusion_backend.measure.bound import has_product


def inside_of_lost(gate: Gate) -> bool:
    """Answer for proposals inside a larger match that was measured and lost. If both are of one
    pattern, Inductor would still compute the rest; if the proposal is a softmax between library
    calls, as in attention, Inductor may replace all of it. If it is half of a gate that was not
    faster, Inductor computes its activation in the kernel that multiplies the halves, and moves no
    byte more. Returns whether anything was answered.
    """
    order = gate.facts.order.__getitem__
    lost = [(d, {*d.match.interior, *d.match.roots}) for d in gate.found if not d.fused]
    lost = [(d, inside) for d, inside in lost if gate.evidence.lost(d.match)]
    found = False
    for d in gate.found:
        if not d.fused or gate.evidence.of(d.match):
            continue
        own = {*d.match.interior, *d.match.roots}
        for larger, inside in lost:
            if not own < inside:
                continue
            same = larger.match.pattern is d.match.pattern
            weighs = any("softmax" in name_of(n) for n in own)
            calls = [order(n) for n in inside - own if weighs and library_call(name_of(n))]
            first, last = min(map(order, own)), max(map(order, own))
            between = calls and min(calls) < first and last < max(calls)
            half = gate.evidence.beaten(larger.match) and half_of(d, inside)
            if same or between or half:
                gate.evidence.record(d.match, Measured("", larger.reason, certain=True))
                found = True
    return found


def half_of(d: Decision, inside: set[fx.Node]) -> bool:
    """Does only elementwise code of the larger match, to its end, read what a product computes?"""
    pending, seen = [u for r in d.match.roots for u in r.users], set()
    while pending:
        n = pending.pop()
        if n not in inside or not elementwise(n):
            return False
        if n not in seen:
            seen.add(n)
            pending += [u for u in n.users if u in inside]
    return has_product(d)
