"""Proposed sites -> answers: from the store, from a measurement in the graph, from a bound, or from
the tables.

The gate proposes sites. The judge forms regions around them, looks up each class of regions in the
store, measures the most valuable of the others in the time that is left, and gives the answers to
the gate, which decides again. If the gate now proposes other sites, the judge answers these in
turn.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Container, Iterator

from torch import fx

from fusion_backend.decide.evidence import Measured
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.measure import answer_text
from fusion_backend.measure import store as stored
from fusion_backend.measure.agree import Ranks
from fusion_backend.measure.allowance import seconds_for
from fusion_backend.measure.bound import bound, has_product, least, promises
from fusion_backend.measure.cut import Cut, cut
from fusion_backend.measure.key import digest, gpu_name, region_digest
from fusion_backend.measure.likeness import Group, alike, group
from fusion_backend.measure.lost import inside_of_lost
from fusion_backend.measure.measuring import (
    ONE_SHORT_LAUNCH,
    Lookahead,
    has_kernels,
    measured,
    unanswered,
)
from fusion_backend.measure.region import Region, regions
from fusion_backend.measure.store import Answer, answer_of
from fusion_backend.options import Options
from fusion_backend.reporting.faults import described
from fusion_backend.reporting.records import UNPROFITABLE, GraphRecord
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.reporting.report import warn_once

MOST_ROUNDS = 8  # in each round except the last, a proposed site is refused for good
SMALL = 0.01  # of a graph's time; to compile and time a smaller part costs more than it gains
ALIKE = 0.05  # of a graph's time; a smaller part is decided as equal sites that were measured
SMALL_PART = "it is less than a hundredth of the graph, too little to measure"
LATE = "another rank did not answer in time"
# Seconds to wait for another rank's answer, in addition to the time in which it may measure; that
# time is unlimited under fusion.gate=measure.
WAITING_S, PATIENCE_S = 60.0, 1800.0


@dataclasses.dataclass
class Class:
    """Equal regions: one of them is measured for all."""

    key: str | None
    cut: Cut
    members: list[tuple[Gate, Region]]
    region: str = ""  # the digest of its text, which is part of the key

    @property
    def sites(self) -> list[Decision]:
        return self.cut.region.sites

    @property
    def value(self) -> float:
        """The least that plain Inductor needs for these sites, in bytes moved."""
        return sum(bound(d).plain for d in self.sites) * len(self.members)

    @property
    def urgency(self) -> tuple[bool, float]:
        """The order of measuring, in case the time is too short: first classes that the tables
        accept or that nobody has timed, then by value.
        """
        refused = (d.doubt is not None and not isinstance(d.doubt, Unmeasured) for d in self.sites)
        return not all(refused), self.value


class Judge:
    """Answers for the sites of one Dynamo graph. compiles: is the graph compiled next? Only then is
    anything measured; stored answers are looked up in any case.
    """

    def __init__(self, options: Options, record: GraphRecord, compiles: bool):
        self.options, self.record = options, record
        wanted = options.gate == "measure" or (options.gate == "auto" and options.measure_s > 0)
        self.measures = compiles and wanted and TARGET.get() is None
        self.compiles = compiles
        self.open = True
        self.least = 0.0  # the least that the graph needs, in bytes moved
        self.graph_s = math.inf  # seconds for measuring this graph
        self.thread_s = 0.0  # of measuring, in CPU time of this thread
        self.won: dict[Group, Answer] = {}  # for the sites of regions that were faster
        self.asked: dict[str, Answer | None] = {}  # the store's answers, by key
        all_of_it = options.gate == "measure"
        # seconds to wait for the answer of another rank
        self.patience = PATIENCE_S if all_of_it else options.measure_s + WAITING_S
        self.settled = True  # would another process look up the same answers, and measure nothing?

    @property
    def active(self) -> bool:
        """Is there anything to learn? Else the tables decide, and nothing is looked at."""
        if self.options.gate not in ("auto", "measure", "table") or TARGET.get() is not None:
            return False
        if self.measures or self.later or stored.seed():
            return True
        return self.options.gate != "table" and not stored.store().empty

    def rounds(self, gates: list[Gate]) -> Iterator[None]:
        """Yields once for each time that the gates must decide, until every proposal has an answer.
        In the last round the gates propose nothing that the tables refuse.
        """
        active = self.active
        for number in range(MOST_ROUNDS):
            for gate in gates:
                gate.evidence.wanted = active and number + 1 < MOST_ROUNDS
            self.open = False
            yield
            if active:
                active = self.answered(gates)
            if not self.open:
                return
        for gate in gates:
            enforce_answers(gate)

    def answered(self, gates: list[Gate]) -> bool:
        """`answer_proposals`; if it fails, which is a fault of ours, the tables decide."""
        try:
            self.answer_proposals(gates)
        except Exception as error:
            self.settled = False
            fault = f"measured answers cannot be used: {described(error)}"
            self.record.faults.append(fault)
            warn_once(f"fault {fault}", f"fusion: {fault}; please report this")
            self.open = True
            return False
        return True

    def answer_proposals(self, gates: list[Gate]) -> None:
        """Answer what the gates propose."""
        for gate in gates:
            self.open |= inside_of_lost(gate)
        classes = sorted(self.classes(gates), key=lambda c: c.urgency, reverse=True)
        if not self.least and self.measures and self.options.gate == "auto":
            inside = {
                n for c in classes for d in c.sites for n in (*d.match.interior, *d.match.roots)
            }
            for gate in gates:
                self.least += least(n for n in gate.facts.view.graph.nodes if n not in inside)
            self.least += sum(c.value for c in classes)
            self.graph_s = seconds_for(gates, self.options)
        told = [*zip(classes, self.answers(classes), strict=True)]
        for c, answer in told:
            self.note(c, answer)
        again = {id(d) for c, answer in told for d in self.hand_out(c, answer)}
        for gate in gates:
            for d in gate.found:
                if d.fused and gate.evidence.of(d.match) is None and id(d) not in again:
                    self.not_judged(gate, d)

    def not_judged(self, gate: Gate, d: Decision) -> None:
        """Without a judge, a site that the tables refuse is not fused. The kernels of all other
        sites, which no measurement has compiled, are compiled when the gate decides again.
        """
        if d.doubt is not None:
            gate.evidence.record(d.match, Measured("", d.doubt.reason))
        elif has_kernels(d):
            gate.evidence.record(d.match, Measured(d.providers, d.reason))
        else:
            return
        self.open = True

    def classes(self, gates: list[Gate]) -> list[Class]:
        """The classes of regions of the proposals that have no answer."""
        found: dict[tuple, Class] = {}
        for gate in gates:
            proposed = [d for d in gate.found if d.fused and on_gpu(d)]
            if all(gate.evidence.of(d.match) for d in proposed):
                continue
            for region in regions(gate.facts, proposed):
                if not all(gate.evidence.of(d.match) for d in region.sites):
                    made = cut_of(gate, region)
                    # a region that cannot be cut out is like no other
                    name = id(region) if region.problem else made.text()
                    codes = tuple(d.op for d in region.sites)
                    one = Class(None, made, [])
                    found.setdefault((name, codes), one).members.append((gate, region))
        for (name, codes), c in found.items():
            if isinstance(name, str):
                ops = [op for op in codes if op is not None]
                c.key = digest(name, ops, gpu_name(c.cut.device))
                c.region = region_digest(name)
        return [*found.values()]

    @functools.cached_property
    def ranks(self) -> Ranks | None:
        """The ranks that compile this graph, too."""
        return Ranks() if self.compiles else None

    def answers(self, classes: list[Class]) -> list[Answer]:
        """An answer for each class: this process measures the classes that no other rank has
        claimed, and then waits for the others' answers.
        """
        found: dict[int, Answer] = {}
        ahead = Lookahead(classes, self.options, self.measures_next)
        for c in classes:
            key = self.key_of(c)
            if self.ranks is None or key is None or self.ranks.claim(key):
                found[id(c)] = self.own(c, ahead)
                if self.ranks is not None and key is not None:
                    mine = found[id(c)].to_json()
                    told = self.ranks.publish(key, mine)
                    if told != mine:  # this rank was too late
                        found[id(c)] = answer_of(json.loads(told))
        for c in classes:
            if id(c) not in found:
                late = unanswered(c, LATE).to_json()
                told = self.ranks.wait(self.key_of(c), late, self.patience)
                found[id(c)] = answer_of(json.loads(told))
                if found[id(c)].why == LATE:  # wait only once for a rank that may have died
                    self.patience = 0.0
                if found[id(c)].kept:
                    stored.store().put(found[id(c)])
        return [found[id(c)] for c in classes]

    def note(self, c: Class, answer: Answer) -> None:
        if answer.verdict == "faster":
            self.won[group(c.sites)] = answer

    def share(self, c: Class, known: Container[int] = ()) -> float:
        """The part of this graph that a class is, without the sites at these indices; infinity if
        every part is measured.
        """
        if self.options.gate != "auto" or not self.least:
            return math.inf
        others = (bound(d).plain for i, d in enumerate(c.sites) if i not in known)
        return sum(others) * len(c.members) / self.least

    def small(self, c: Class, now: Class | None = None) -> bool:
        """Is it too small a part of this graph to be measured? Of a class below ALIKE, sites like
        those that were faster in another region do not count. now: a class that is being measured
        and may turn out to be faster.
        """
        if self.share(c) >= ALIKE:
            return False
        hoped = [group(now.sites)] if now else []
        return self.share(c, alike(c.sites, [*self.won, *hoped])) < SMALL

    def key_of(self, c: Class) -> str | None:
        """The name of a class among ranks. A class that is too small is so only in graphs like this
        one.
        """
        return f"{c.key} of {self.least:.0f}" if c.key and self.share(c) < ALIKE else c.key

    def measures_next(self, c: Class, now: Class) -> bool:
        """Will this process measure the class after this one, as far as can be said now?"""
        single = self.ranks is None or self.ranks.store is None
        unknown = known_answer(c.key, self.options) is None
        return self.measures and single and unknown and not self.small(c, now)

    def own(self, c: Class, ahead: Lookahead) -> Answer:
        """The answer that this process knows or measures."""
        found = known_answer(c.key, self.options)
        if found is None and self.measures:
            if self.small(c):
                found = unanswered(c, SMALL_PART)
            else:
                started = time.thread_time()
                found = measured(c, self.options, self.record, ahead, self.graph_s)
                self.thread_s += time.thread_time() - started
            self.settled &= found.kept or final(c, found)
        if c.key:
            self.asked[c.key] = known_answer(c.key, self.options)
        if found is not None:
            self.note(c, found)
        return found or unanswered(c, "")

    def hand_out(self, c: Class, answer: Answer) -> list[Decision]:
        """Give an answer to the gates of all regions of a class. If it changes only the reason,
        nothing is decided again. If sites with a matrix product gain nothing, the other sites of
        the region get no answer and are returned: the next round judges them without the product,
        which took most of the time.
        """
        again: list[Decision] = []
        products = [has_product(d) for d in c.sites]
        lost = answer.verdict not in ("", "faster")
        apart = lost and any(products) and not all(products)
        likes = alike(c.sites, self.won) if answer.why == SMALL_PART else {}
        for gate, region in c.members:
            for i, d in enumerate(region.sites):
                if apart and not products[i]:
                    self.open = True
                    again.append(d)
                    continue
                if i in likes:
                    told = self.answer_like(*likes[i])
                else:
                    take = answer.take[i] if i < len(answer.take) else ""
                    told = self.answer_for(d, answer, take)
                gate.evidence.record(d.match, told)
                # sites that are taken without a measurement have kernels that nobody has compiled
                # yet
                compiled = told.certain or not gate.evidence.wanted or not has_kernels(d)
                if told.take == d.providers and d.doubt is None and compiled:
                    d.reason = told.reason
                else:
                    self.open = True
        return again

    def answer_like(self, measured: Group, place: int) -> Measured:
        """The answer about one site that is like one of a region that was faster."""
        take = self.won[measured].take[place]
        return Measured(take, answer_text.like_another(self.won[measured], take), certain=True)

    def answer_for(self, d: Decision, answer: Answer, take: str) -> Measured:
        """The answer about one site."""
        together = len(answer.sites) > 1
        if answer.verdict:
            beaten = answer.verdict in ("slower", "same")
            return Measured(take, answer_text.reason(answer, take, together), True, beaten)
        if d.doubt is not None:
            return Measured("", f"{d.doubt.reason}; {answer.why}".removesuffix("; "))
        if not answer.why:  # nobody asked
            later = "; it will be measured when it is compiled" if self.later else ""
            return Measured(d.providers, d.reason + later)
        taken = promises(d)
        return Measured(d.providers if taken else "", answer_text.unmeasured(answer.why, taken))

    @property
    def later(self) -> bool:
        """Would a compilation measure what nobody has measured?"""
        return self.options.gate == "auto" and self.options.measure_s > 0 and not self.measures


def known_answer(key: str | None, options: Options) -> Answer | None:
    """The stored answer: this user's, or else the one that ships with the package."""
    found = stored.seed().get(key or "")
    if options.gate != "table" and key:
        found = stored.store().get(key) or found
    return found


def final(c: Class, answer: Answer) -> bool:
    """Is there no verdict because there is nothing to measure? Then another process has none
    either. If the time was up or the noise too high, another process may have one.
    """
    return bool(c.cut.region.problem) or answer.why in (SMALL_PART, ONE_SHORT_LAUNCH)


def cut_of(gate: Gate, region: Region) -> Cut:
    facts = gate.facts
    training = any(facts.training(d.match) for d in region.sites)

    def wanted(n: fx.Node) -> bool:
        return facts.view.trains(n)

    return cut(facts, region, training, wanted)


def enforce_answers(gate: Gate) -> None:
    """After the last round, unfuse every site that is not fused as its answer says."""
    for d in gate.found:
        answer = gate.evidence.of(d.match)
        if d.fused and answer is not None and answer.take != d.providers:
            d.fused, d.forward, d.backward = False, None, None
            lost = "left to Inductor: it was answered too late, in the last round of decisions"
            d.reason, d.cause = lost if answer.take else answer.reason, UNPROFITABLE


def on_gpu(d: Decision) -> bool:
    return d.match.roots[0].meta["val"].device.type == "cuda"
