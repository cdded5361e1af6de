"""Which nodes the fused sites of a graph compute and read: two sites may not both compute a node,
and none may read what another computes inside.
"""

from __future__ import annotations

from torch import fx

from fusion_backend.decide.legality import COST_NOTHING, Legality, result
from fusion_backend.match.matcher import Match
from fusion_backend.reporting.places import location


class Claims:
    """Of the sites that have been fused so far, in one graph."""

    def __init__(self, legality: Legality):
        self.legality = legality
        self.computed: dict[fx.Node, Match] = {}
        self.inside: dict[fx.Node, Match] = {}  # of these, those that nobody else may read
        self.read: dict[fx.Node, Match] = {}

    def add(self, match: Match) -> None:
        of = self.legality.canon.of
        results = {of[r] for r in match.roots}
        stays = [*match.roots, *(n for n in match.interior if of[n] in results)]
        self.computed |= dict.fromkeys((*stays, *self.legality.computed(match)), match)
        self.inside |= dict.fromkeys((n for n in self.hidden(match) if n not in stays), match)
        self.read |= dict.fromkeys(match.nodes_read, match)

    def overlap(self, match: Match) -> str:
        """Does another site compute a node of this one?"""
        costly = self.legality.costly(match)
        other = next((self.computed[n] for n in costly if n in self.computed), None)
        if other is None:
            return ""
        larger = other.template.size > match.template.size
        how = "larger" if larger else "as large and was registered first"
        return f"overlaps {other.pattern.name}, which is {how}"

    def hidden(self, match: Match) -> list[fx.Node]:
        """The nodes inside that compute something, and what is made of them. Views of arguments
        stay in the graph if anybody reads them.
        """
        found: dict[fx.Node, None] = {}
        for n in self.legality.computed(match):
            costs = self.legality.canon.of[n].op not in COST_NOTHING
            if costs or not found.keys().isdisjoint(n.all_input_nodes):
                found[n] = None
        return [*found]

    def conflict(self, match: Match) -> str:
        """Does this site read what another one computes inside, or the reverse? An argument may be
        a value before its rounding, which the site that rounds it does not keep.
        """
        for n in match.nodes_read:
            if n in self.inside:
                other = self.inside[n].pattern.name
                return f"its argument, {result(n)} at {location(n)}, is inside {other}"
        for n in self.hidden(match):
            if n in self.read and n not in match.roots:
                other = self.read[n].pattern.name
                return f"{result(n)} inside it, at {location(n)}, is read by {other}"
        return ""
