"""The measured answers for the sites of a graph, which the gate follows."""

from __future__ import annotations

import dataclasses

from torch import fx

from fusion_backend.match.matcher import Match


@dataclasses.dataclass(frozen=True)
class Measured:
    """The providers of a site, "kernel/vjp" for forward and backward or "" for Inductor, and the
    reason as a sentence. certain: the answer comes from a measurement, not from a bound or the
    tables. beaten: it was timed, and Inductor is as fast or faster.
    """

    take: str
    reason: str
    certain: bool = False
    beaten: bool = False


class Evidence:
    """The answers for the sites of one graph, which a judge gives between two rounds of decisions.

    wanted: is there a judge who answers? Then the gate also proposes sites that the tables refuse,
    with their reason in `Decision.doubt`.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.answers: dict[tuple[str, fx.Node], Measured] = {}

    def of(self, match: Match) -> Measured | None:
        return self.answers.get((match.pattern.name, match.roots[0]))

    def won(self, match: Match) -> bool:
        """Was it measured, and is it faster here?"""
        answer = self.of(match)
        return answer is not None and answer.take != ""

    def lost(self, match: Match) -> bool:
        """Was it measured, and is it left to Inductor?"""
        answer = self.of(match)
        return answer is not None and answer.certain and answer.take == ""

    def beaten(self, match: Match) -> bool:
        """Was it timed, and is Inductor as fast or faster?"""
        answer = self.of(match)
        return answer is not None and answer.beaten

    def runs(self, match: Match) -> bool:
        """Has a measurement compiled and run its kernels, or will one do so before they are
        used?
        """
        answer = self.of(match)
        return self.wanted if answer is None else answer.certain

    def record(self, match: Match, answer: Measured) -> None:
        self.answers[match.pattern.name, match.roots[0]] = answer
