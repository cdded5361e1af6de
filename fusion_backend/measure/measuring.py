"""Measures one class of regions: tries which sites to replace, and with which providers, until a
choice is certain or the time is up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from itertools import filterfalse
from typing import TYPE_CHECKING

import torch

from fusion_backend.decide.gate import Decision
from fusion_backend.measure import store as stored
from fusion_backend.measure.allowance import ALLOWANCE
from fusion_backend.measure.bound import bound, has_product
from fusion_backend.measure.contest import Contest, NotMeasurable, ResultsDiffer, contest
from fusion_backend.measure.cut import summary
from fusion_backend.measure.key import code_of_each, gpu_name, machine
from fusion_backend.measure.rivals import rivals
from fusion_backend.measure.store import Answer
from fusion_backend.measure.timing import ROUNDS, Race
from fusion_backend.options import Options
from fusion_backend.reporting.faults import of_kernel
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.reporting.report import warn_once

if TYPE_CHECKING:
    from fusion_backend.measure.judge import Class


ONE_SHORT_LAUNCH = "it is one short launch, too little to gain from"
# The parts of the time in which a better choice than one that has won is looked for, and in which
# the sites of a region that has lost are tried one by one. The rest is for regions of which nothing
# is known.
REFINING, SEARCHING = 0.2, 0.5
# Sites of one pattern that take twice as long together, such as the norms of queries and of keys,
# are not tried one by one.
HOPELESS = 0.5


class Lookahead:
    """The classes in their order, and the code of the next one that will be measured, which is
    generated while Inductor's workers compile the kernels of the one before. wanted: will a class
    be measured after another, as far as is known while that is measured?
    """

    def __init__(
        self, classes: list[Class], options: Options, wanted: Callable[[Class, Class], bool]
    ):
        self.classes, self.options, self.wanted = classes, options, wanted
        self.next: tuple[Class, Contest] | None = None
        self.took = 0.0  # seconds that were spent on the next class

    def generate(self, now: Class, until: float) -> None:
        """Generate the code of the class after this one, unless it is too late for that. Should it
        fail, it will be generated when the class is measured.
        """
        started = time.perf_counter()
        if started >= until:
            return
        after = itertools.dropwhile(lambda c: c is not now, self.classes)
        for c in filter(lambda c: self.wanted(c, now), itertools.islice(after, 1, None)):
            if not hindrance(c, self.options) and c.cut.device == now.cut.device:
                with contextlib.suppress(Exception):
                    self.next = c, Contest(c.cut, c.sites, until, beside=now.cut)
                break
        self.took = time.perf_counter() - started

    def taken(self, c: Class) -> tuple[Contest | None, float]:
        """The contest of this class, if its code has been generated, and the seconds that were
        spent on it.
        """
        ahead, took = self.next, self.took
        self.next, self.took = None, 0.0
        return (ahead[1], took) if ahead is not None and ahead[0] is c else (None, 0.0)


def hindrance(c: Class, options: Options) -> str:
    """Why a class is not measured, however much time there is; "" if it is."""
    if c.cut.region.problem:
        return c.cut.region.problem
    hopeless = all(bound(d).hopeless and d.doubt is not None for d in c.sites)
    return ONE_SHORT_LAUNCH if hopeless and options.gate != "measure" else ""


def measured(
    c: Class, options: Options, record: GraphRecord, ahead: Lookahead, graph_s: float
) -> Answer:
    """The answer for a class; kept in the store where it is certain. graph_s: the seconds for its
    graph.
    """
    if why := hindrance(c, options):
        return unanswered(c, why)
    of_graph = graph_s - record.measure_s
    left = ALLOWANCE.left(options, of_graph)
    begun, before = ahead.taken(c)
    if left <= 0:
        return unanswered(c, f"not measured, {used_up(options, graph_s)}")
    started = time.perf_counter() - before
    until = started + left
    try:
        meanwhile = functools.partial(ahead.generate, c, started + min(left, of_graph))
        with contest(c.cut, c.sites, until, begun, meanwhile) as held:
            parts = (ALLOWANCE.part_left(options, part) for part in (SEARCHING, REFINING))
            searching, refining = (started + ahead.took + min(part, of_graph) for part in parts)
            found = Choice(c, held, until, searching, refining).answer()
    except Exception as error:
        why = str(error) if isinstance(error, NotMeasurable) else of_kernel(error)
        found = unanswered(c, f"it could not be measured: {why}")
    finally:
        took = time.perf_counter() - started - ahead.took
        ALLOWANCE.spend(took)
        record.measure_s += took
        record.measured += 1
    if found.kept and c.key:
        keep(found)
    return found


def keep(answer: Answer) -> None:
    """Put an answer into the store."""
    if why := stored.store().put(answer):
        told = f"fusion: what was measured is forgotten when this process ends: {why}"
        warn_once("measured answers", told)


def used_up(options: Options, graph_s: float) -> str:
    """Which time is used up: that of the process, or else that of this graph."""
    if ALLOWANCE.left(options) <= 0:
        return f"the {options.measure_s:g} s of fusion.measure_s are used up"
    return f"the {graph_s:.3g} s of fusion.measure_s for a graph of this size are used up"


class Choice:
    """The races of one class, until a time; those of single sites and of smaller choices than one
    that has won, until earlier ones, `searching` and `refining`.
    """

    def __init__(self, c: Class, held: Contest, until: float, searching: float, refining: float):
        self.c, self.held = c, held
        self.until, self.searching, self.refining = until, searching, refining
        self.races: list[tuple[list[Decision], Race, int]] = []
        self.rivals: list[tuple[list[Decision], Race, int]] = []
        self.failed = ""  # why a variant could not be timed
        # how a variant differs from plain Inductor, or how its kernel failed
        self.wrong = self.broken = ""

    def run(self) -> None:
        """Race all sites together. If they are faster, also race those without kernels alone:
        Inductor computes them together with their neighbours, while a kernel stands apart. If they
        are not faster, race each alone, and then those that are faster together, unless all are of
        one pattern and take more than twice as long. If those with a matrix product lose alone,
        too, the others are not raced: the judge asks for them again without the product. For a
        single site, race the other half (the backward alone, or both). A faster choice also races
        against the smaller sites that it covers. What follows the first race has less time.
        """
        sites, gate = self.c.sites, self.c.members[0][0]
        if self.faster(sites):
            without = [d for d in sites if not has_kernels(d)]
            if 0 < len(without) < len(sites) and self.in_time(self.refining):
                self.faster(without)
        elif len(sites) > 1 and not self.hopeless:
            products, others = [*filter(has_product, sites)], [*filterfalse(has_product, sites)]
            alone = self.faster_alone(products)
            if not (products and self.lost):
                alone += self.faster_alone(others)
            if 1 < len(alone) < len(sites):
                self.faster(alone)
        elif len(sites) == 1 and self.in_time(self.searching):
            if other := gate.other_half(sites[0]):
                self.faster([other])
        if any(race.verdict == "faster" for _, race, _ in self.races):
            own, self.races = self.races, []
            for rival in rivals(gate, sites):
                if self.in_time(self.refining):
                    self.faster(rival)
            self.rivals, self.races = self.races, own

    def faster_alone(self, sites: list[Decision]) -> list[Decision]:
        return [d for d in sites if self.in_time(self.searching) and self.faster([d])]

    @property
    def hopeless(self) -> bool:
        """Are all sites of one pattern, and far slower together than plain Inductor?"""
        one = len({d.match.pattern.name for d in self.c.sites}) == 1
        return one and self.lost and self.races[0][1].interval[1] < HOPELESS

    @property
    def lost(self) -> bool:
        """Was every choice timed, and found to be no faster?"""
        untold = self.failed or self.wrong or self.broken or not self.races
        return not untold and all(told(r) in ("slower", "same") for _, r, _ in self.races)

    def in_time(self, until: float) -> bool:
        """Can the region be compiled once more until then? As long is expected as plain Inductor
        took.
        """
        return time.perf_counter() + self.held.compile_s < until

    def faster(self, chosen: list[Decision]) -> bool:
        """Race plain Inductor against the region with these sites replaced, if there is time left
        to compile it.
        """
        if not self.held.generated(chosen) and not self.in_time(self.until):
            return False
        seconds = self.until - time.perf_counter()
        try:
            race, more = self.held.against(chosen, seconds)
        except torch.OutOfMemoryError:
            raise
        except ResultsDiffer as error:
            self.wrong = str(error)
            return False
        except NotMeasurable as error:
            self.failed = str(error)
            return False
        except Exception as error:
            self.broken = of_kernel(error)
            names = ", ".join(dict.fromkeys(d.match.pattern.where for d in chosen))
            told = f"fusion: {names}: {self.broken}; its sites are left to Inductor"
            warn_once(f"measured {names}", told)
            return False
        self.races.append((chosen, race, more))
        return race.verdict == "faster"

    def answer(self) -> Answer:
        """The fastest certain choice; without one, the answer that Inductor keeps the sites, or
        that the measurement is uncertain.
        """
        self.run()
        won = [r for r in self.races if r[1].verdict == "faster"]
        if not won and (why := self.wrong or self.broken):
            refused = unanswered(self.c, why)
            return dataclasses.replace(refused, verdict="wrong" if self.wrong else "failed")
        if not self.races:
            return unanswered(self.c, self.failed or "the time to measure it was up")
        chosen, race, more = max(won or self.races, key=lambda r: r[1].ratio)
        taken = {d.match.roots[0]: d.providers for d in chosen} if won else {}
        low, high = race.interval
        verdict = told(race)
        why = "" if verdict else f"its times vary too much, {low:.2f} to {high:.2f} times as fast"
        if math.isinf(high):
            rounds = f"{len(race.plain)} of at least {ROUNDS[0]} rounds"
            why = f"the time to measure it was up after {rounds}"
        better = [r for r in self.rivals if r[1].verdict == "faster" and r[1].ratio > race.ratio]
        if won and better:
            rival, faster, _ = max(better, key=lambda r: r[1].ratio)
            names = ", ".join(dict.fromkeys(d.match.pattern.name for d in rival))
            why = f"{names} inside of it gains more, {faster.ratio:.2f} over {race.ratio:.2f}"
            taken = {}
        return dataclasses.replace(
            unanswered(self.c, why),
            take=tuple(taken.get(d.match.roots[0], "") for d in self.c.sites),
            plain_ms=statistics.median(race.plain),
            ours_ms=statistics.median(race.ours),
            ratio=race.ratio,
            low=low,
            high=min(high, 1e6),
            verdict=verdict,
            more_bytes=more,
        )


def told(race: Race) -> str:
    """The verdict of an answer; "" if the race is uncertain."""
    return race.verdict or ("same" if race.no_faster or race.close else "")


def has_kernels(d: Decision) -> bool:
    return "kernel" in (d.forward, d.backward)


def unanswered(c: Class, why: str) -> Answer:
    """An answer without a verdict."""
    names = tuple(d.match.pattern.name for d in c.sites)
    about = {**machine(gpu_name(c.cut.device)), "operators": summary(c.cut.region)}
    about["training"] = bool(c.cut.grads)
    about["region"] = c.region
    about["code"] = code_of_each([d.op for d in c.sites if d.op is not None])
    date = datetime.date.today().isoformat()
    return Answer(c.key or "", names, ("",) * len(names), why=why, date=date, about=about)
