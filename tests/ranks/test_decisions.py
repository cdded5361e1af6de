"""Ranks decide as one where each would measure otherwise, and none waits for what another has not
got.
"""

import pytest


@pytest.fixture
def seen(ranks) -> list[dict]:
    return [r["decisions"] for r in ranks]


def fused(seen, what: str) -> list[bool]:
    """Of the one site on each rank."""
    found = [one["measured"][what] for one in seen]
    assert [len(sites) for sites in found] == [1, 1]
    return [fused for ((_, fused, _),) in found]


def test_all_take_the_answer_of_the_rank_that_measures(seen):
    assert fused(seen, "alone") == [True, False]
    assert len({*fused(seen, "together")}) == 1
    assert sum(one["measured"]["measured"] for one in seen) == 1


def test_all_take_one_of_two_answers_that_were_kept(seen):
    assert len({*fused(seen, "kept")}) == 1


def test_ranks_that_decide_different_graphs_do_not_wait(seen):
    first, second = (one["measured"]["apart"][0] for one in seen)
    assert first[1] and "here, measured today" in first[2]
    left = "left to Inductor: 0.50 times as fast in its region, measured today"
    assert not second[1] and second[2] == left


def test_a_rank_that_cannot_decide_trains_on_with_plain_inductor(seen):
    good, broken = (one["failing"] for one in seen)
    assert {*good["errors"]} == {None} and good["fused"]
    assert {*broken["errors"]} == {"RuntimeError: planted"} and not broken["fused"]
    for one in (good, broken):
        assert one["losses"]["fusion"] == pytest.approx(one["losses"]["eager"], rel=1e-5)


def test_a_second_compilation_finds_the_caches_of_inductor_but_decides_anew(seen):
    for one in seen:
        _, again = one["restarted"]
        hits = {"fxgraph_cache_hit": 2, "autograd_cache_hit": 1}
        assert again == hits | {"remembered": False, "fused": True}
