"""The smaller sites that could be fused in place of a larger one with a matrix product: for
example, an activation alone instead of a linear layer with its activation.

For sites without a product no rivals are tried: the larger site moves fewer bytes. A softmax inside
attention is no rival either, because Inductor replaces attention as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion_backend.capture.view import name_of
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.decide.neighbours import library_call
from fusion_backend.reporting.records import COVERED


def rivals(gate: Gate, sites: list[Decision]) -> Iterator[list[Decision]]:
    """The sites that these cover, as the gate would propose them: the larger ones first, then those
    that these cover in turn.
    """
    inside = {n for d in sites for n in (*d.match.interior, *d.match.roots)}
    found = (proposed(gate, d, inside) for d in gate.found)
    pool = [d for d in found if d is not None]
    while pool:
        chosen: list[Decision] = []
        taken: set = set()
        for d in pool:
            own = {*d.match.interior, *d.match.roots}
            if not own & taken:
                chosen.append(d)
                taken |= own
        yield chosen
        pool = [d for d in pool if d not in chosen]


def proposed(gate: Gate, covered: Decision, inside: set) -> Decision | None:
    """The decision of the gate about a covered site if nothing covered it; None unless the site
    lies inside, leaves a product there to Inductor, and would be fused.
    """
    match = covered.match
    own = {*match.interior, *match.roots}
    if covered.cause != COVERED or not own <= inside:
        return None
    if not any(library_call(name_of(n)) for n in inside - own):
        return None
    if any("softmax" in name_of(n) for n in own):
        return None
    if gate.unwanted(match) or gate.legality.refusal(match):
        return None
    found = gate.provided_once(match)
    return found if found.fused else None
