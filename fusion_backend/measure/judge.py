"""Proposed sites -> answers: from the store, from a bound, or by measuring them where they stand.

The gate proposes; the judge forms regions of what is proposed, asks the store about each class of
them, measures the most valuable of the rest within the time that is left, and hands the answers to
the gate, which decides once more. What it then proposes instead is judged in turn.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import threading
import time
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from fusion_backend.decide.facts import Facts
from fusion_backend.decide.gate import Decision, Gate, Measured
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.measure import store as stored
from fusion_backend.measure.agree import agreed
from fusion_backend.measure.bound import ENOUGH, bound
from fusion_backend.measure.contest import Contest, Lost, contest
from fusion_backend.measure.cut import Cut, cut, summary
from fusion_backend.measure.key import gpu_name, key_of, machine
from fusion_backend.measure.region import Region, regions
from fusion_backend.measure.store import Answer, answer_of
from fusion_backend.measure.timing import Race
from fusion_backend.options import Options
from fusion_backend.reporting.faults import of_kernel
from fusion_backend.reporting.records import GraphRecord

MOST_ROUNDS = 8  # each round, something that was proposed is refused for good
WAITING_S = 60.0  # beyond the time to measure, for the answer of another rank


class Allowance:
    """The seconds that this process may still measure, for each limit that is asked for."""

    def __init__(self) -> None:
        self.used = 0.0
        self.lock = threading.Lock()

    def left(self, options: Options) -> float:
        return max(0.0, options.measure_s - self.used) if options.gate != "measure" else 1e9

    def spend(self, seconds: float) -> None:
        with self.lock:
            self.used += seconds


ALLOWANCE = Allowance()


@dataclasses.dataclass
class Class:
    """Regions that are alike: one of them is measured, for all."""

    key: str | None
    cut: Cut
    gate: Gate
    members: list[tuple[Gate, Region]]

    @property
    def sites(self) -> list[Decision]:
        return self.cut.region.sites

    @property
    def value(self) -> float:
        return sum(bound(d).plain for d in self.sites) * len(self.members)


class Judge:
    """Of the sites of one Dynamo graph. `compiles`: is the graph compiled next? Only then is
    anything measured; the store is asked in any case.
    """

    def __init__(self, options: Options, record: GraphRecord, compiles: bool):
        self.options, self.record, self.compiles = options, record, compiles
        self.open = True

    def rounds(self) -> Iterator[int]:
        """For each time that the gates are to decide: until nothing is proposed that has no
        answer.
        """
        for number in range(MOST_ROUNDS):
            if not self.open:
                return
            self.open = False
            yield number

    def hear(self, gates: Iterable[Gate]) -> None:
        """Answer what the gates propose."""
        if self.options.gate not in ("auto", "measure", "table") or TARGET.get() is not None:
            return
        classes: dict[object, Class] = {}
        for gate in gates:
            for region in self.asked(gate):
                found = self.class_of(gate, region)
                known = classes.setdefault(found.key or found, found)
                known.members.append((gate, region))
        for c in sorted(classes.values(), key=lambda c: -c.value):
            answer = self.answer(c)
            if answer is not None:
                self.open = True
                tell(c, answer)

    def asked(self, gate: Gate) -> list[Region]:
        """The regions in which something is proposed that has no answer."""
        proposed = [d for d in gate.found if d.fused and on_gpu(d)]
        if all(gate.answer(d.match) is not None for d in proposed):
            return []
        around = regions(gate.facts.view, proposed)
        return [r for r in around if any(gate.answer(d.match) is None for d in r.sites)]

    def class_of(self, gate: Gate, region: Region) -> Class:
        facts: Facts = gate.facts
        training = any(facts.training(d.match) for d in region.sites)

        def wants(n: fx.Node) -> bool:
            return n in facts.view.requires_grad or facts.from_training(n)

        made = cut(facts.view, region, training, wants)
        key = None
        if not region.problem:
            ops = [d.op for d in region.sites if d.op is not None]
            key = key_of(made.text(), ops, gpu_name(device_of(region)))
        return Class(key, made, gate, [])

    def answer(self, c: Class) -> Answer | None:
        """What holds for a class: None where the gate's own answer stands."""
        found = stored.seed().get(c.key or "")
        if self.options.gate == "table":
            return found
        found = (stored.store().get(c.key) if c.key else None) or found
        asked = self.options.measure_s > 0 or self.options.gate == "measure"
        if found is None and self.compiles and asked:
            found = self.agreed_on(c)
        if found is None or found.verdict:
            return found
        return predicted(c, found)

    def agreed_on(self, c: Class) -> Answer:
        """Measured by this process, or by the rank that was asked first."""
        if c.key is None:
            return self.measure(c)
        seconds = self.options.measure_s + WAITING_S
        late = dataclasses.replace(unanswered(c), why="another rank did not answer in time")
        told = agreed(c.key, lambda: self.measure(c).to_json(), late.to_json(), seconds)
        return answer_of(json.loads(told))

    def measure(self, c: Class) -> Answer:
        left, started = ALLOWANCE.left(self.options), time.perf_counter()
        if c.cut.region.problem:
            return dataclasses.replace(unanswered(c), why=c.cut.region.problem)
        if all(bound(d).hopeless for d in c.sites) and self.options.gate != "measure":
            why = "it is one short launch, too little to gain from"
            return dataclasses.replace(unanswered(c), why=why)
        if left <= 0:
            limit = f"{self.options.measure_s:g}"
            why = f"not measured, the {limit} s of fusion.measure_s were used up"
            return dataclasses.replace(unanswered(c), why=why)
        try:
            with contest(c.cut, device_of(c.cut.region)) as held:
                found = Measurement(c, held, started + left).best()
        except Exception as error:
            why = str(error) if isinstance(error, Lost) else of_kernel(error)
            found = dataclasses.replace(unanswered(c), why=f"it could not be measured: {why}")
        finally:
            took = time.perf_counter() - started
            ALLOWANCE.spend(took)
            self.record.measure_s += took
            self.record.measured += 1
        if found.verdict and c.key:
            stored.store().put(found)
        return found


class Measurement:
    """The contests of one class, until a choice is certain or the time is up."""

    def __init__(self, c: Class, held: Contest, until: float):
        self.c, self.held, self.until = c, held, until
        self.races: list[tuple[list[Decision], Race, int]] = []
        self.lost = ""

    def best(self) -> Answer:
        """All sites; if that is not faster, each by itself and what is faster together; of a single
        one, the backward alone.
        """
        sites = self.c.sites
        if not self.faster(sites):
            if len(sites) > 1:
                alone = [d for d in sites if self.faster([d])]
                if 1 < len(alone) < len(sites):
                    self.faster(alone)
            else:
                other = self.c.gate.backward_only(sites[0])
                if other is not None:
                    self.faster([other])
        return self.chosen()

    def faster(self, chosen: list[Decision]) -> bool:
        seconds = self.until - time.perf_counter()
        if seconds <= 0:
            return False
        try:
            found, more = self.held.against(chosen, seconds)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.lost = str(error) if isinstance(error, Lost) else of_kernel(error)
            return False
        self.races.append((chosen, found, more))
        return found.verdict == "faster"

    def chosen(self) -> Answer:
        base = unanswered(self.c)
        if not self.races:
            return dataclasses.replace(base, verdict="slower" if self.lost else "", why=self.lost)
        won = [r for r in self.races if r[1].verdict == "faster"]
        chosen, race, more = max(won or self.races, key=lambda r: r[1].ratio)
        taken = {d.match.roots[0]: providers(d) for d in chosen} if won else {}
        verdict = race.verdict
        low, high = race.interval
        if not verdict and high < 1.01:
            verdict = "same"
        return dataclasses.replace(
            base,
            take=tuple(taken.get(d.match.roots[0], "") for d in self.c.sites),
            plain_ms=median(race.plain),
            ours_ms=median(race.ours),
            ratio=race.ratio,
            low=low,
            high=min(high, 1e9),
            verdict=verdict,
            more_bytes=more,
            why="" if verdict else f"the times vary too much, {low:.2f} to {high:.2f} in context",
        )


def predicted(c: Class, answer: Answer) -> Answer:
    """An answer without a verdict: a site is taken only where a pessimistic prediction gains
    much.
    """
    take = tuple(providers(d) if bound(d).gain >= ENOUGH else "" for d in c.sites)
    return dataclasses.replace(answer, take=take)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def unanswered(c: Class) -> Answer:
    names = tuple(d.match.pattern.name for d in c.sites)
    about = {**machine(gpu_name(device_of(c.cut.region))), "operators": summary(c.cut.region)}
    about["training"] = bool(c.cut.grads)
    today = datetime.date.today().isoformat()
    return Answer(c.key or "", names, ("",) * len(names), date=today, about=about)


def device_of(region: Region) -> torch.device:
    return region.sites[0].match.roots[0].meta["val"].device


def on_gpu(d: Decision) -> bool:
    return d.match.roots[0].meta["val"].is_cuda


def providers(d: Decision) -> str:
    return f"{d.forward}/{d.backward}"


def tell(c: Class, answer: Answer) -> None:
    """Hand an answer to the gates of all regions of a class."""
    for gate, region in c.members:
        for i, d in enumerate(region.sites):
            take = answer.take[i] if i < len(answer.take) else ""
            gate.tell(d.match, Measured(take, reason(answer, take, len(region.sites) > 1)))


def reason(answer: Answer, take: str, together: bool) -> str:
    """The answer in a sentence."""
    if not answer.verdict:
        predicts = "bytes and launches alone promise enough" if take else "left to Inductor"
        return f"{predicts}: {answer.why}"
    if not answer.plain_ms:
        return f"left to Inductor: {answer.why}, {answer.when}"
    others = " with its neighbours" if together else ""
    if take:
        more = answer.more_bytes >> 20
        kept = f", keeps {more} MB more for backward" if more > 0 else ""
        times = f"{answer.ours_ms:.3f} ms, Inductor {answer.plain_ms:.3f} ms here{others}"
        return f"{times}{kept}, {answer.when}"
    return f"left to Inductor: {answer.ratio:.2f} in context{others}, {answer.when}"
