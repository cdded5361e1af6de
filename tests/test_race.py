"""Races: when a difference between two times is certain, and when it is not."""

import itertools
import math
import random

import pytest

from fusion_backend.measure import timing
from fusion_backend.measure.contest import decided
from fusion_backend.measure.timing import ROUNDS, Race, race


def noisy(ratio, spread, seed=0):
    numbers = random.Random(seed)
    found = Race()
    while len(found.plain) < 60 and not found.verdict:
        found.add(ratio * numbers.lognormvariate(0, spread), numbers.lognormvariate(0, spread))
    return found


def test_a_race_is_certain_or_undecided():
    assert {noisy(1.2, 0.01, s).verdict for s in range(20)} == {"faster"}
    assert {noisy(0.9, 0.01, s).verdict for s in range(20)} == {"slower"}
    assert {noisy(1.0, 0.001, s).verdict for s in range(20)} == {"same"}
    wrong = sum(noisy(1.0, 0.05, s).verdict in ("faster", "slower") for s in range(300))
    assert wrong <= 12  # of the sequence of looks; each by itself is wrong once in a hundred


def test_a_few_rounds_prove_nothing():
    found = Race()
    for _ in range(7):
        found.add(2.0, 1.0)
    assert found.verdict == "" and found.interval == (0.0, math.inf)
    found.add(2.0, 1.0)
    assert found.verdict == "faster" and found.interval == (2.0, 2.0)


@pytest.mark.parametrize("noise, close", [(0.01, True), (0.04, False)])
def test_a_ratio_is_close_to_a_gain_within_two_percent(noise, close):
    """Whatever gain counts: beside a convolution that is more than 2 %."""
    found = Race(worth=0.1)
    for i in range(20):
        found.add(1.1 + noise * (-1) ** i, 1.0)
    assert not found.verdict and found.close == close


def test_an_interval_holds_the_median_99_times_in_100():
    numbers, missed = random.Random(1), 0
    for _ in range(1000):
        found = Race()
        for _ in range(15):
            found.add(numbers.lognormvariate(0.1, 0.3), 1.0)
        low, high = found.interval
        missed += not low <= math.exp(0.1) <= high
    assert 0 < missed <= 20


def test_a_late_race_still_has_rounds_enough_for_a_verdict():
    found = race(lambda: 2.0, lambda: 1.0, lambda call: call(), seconds=0.0)
    assert found.verdict == "faster" and len(found.plain) == ROUNDS[0]


def test_a_race_ends_when_its_time_is_up_and_alternates(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_S", 0.0)
    turns = []
    times = {"plain": 3.0, "ours": 2.0}

    def clock(call):
        turns.append(call())
        return times[turns[-1]] * (1 + 0.3 * (len(turns) % 3))

    found = race(lambda: "plain", lambda: "ours", clock, seconds=0.0)
    assert len(found.plain) == 1 and found.plain[0] > found.ours[0]
    turns.clear()
    race(lambda: "plain", lambda: "ours", clock, seconds=1.0)
    assert turns[2:4] == ["ours", "plain"] and turns[4:6] == ["plain", "ours"]


def test_by_how_much_a_race_is_lost_is_not_looked_for():
    """A loss of about 1 % is neither certain nor excluded; that nothing is gained is certain."""
    ratios = itertools.cycle([0.985, 0.995])

    def raced(**more):
        return race(lambda: next(ratios), lambda: 1.0, lambda call: call(), seconds=60.0, **more)

    until_certain, found = raced(), raced(decided=decided)
    assert not until_certain.verdict and len(until_certain.plain) == ROUNDS[1]
    assert not found.verdict and len(found.plain) == ROUNDS[0]
    ratios = itertools.cycle([1.5, 1.6])
    assert raced(decided=decided).verdict == "faster"
    ratios = itertools.cycle([0.985, 1.05])
    assert len(raced(decided=decided).plain) == ROUNDS[1]
