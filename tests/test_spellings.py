"""Generated spellings of every pattern are recognised, near misses are left right; and the generator itself."""

import linecache

import pytest
import torch
from torch import Tensor

from fusion_backend import Pattern
from fusion_backend.backend import patterns
from fusion_backend.canonical import RULES
from fusion_backend.pattern import unregister
from fusion_backend.spelling.recall import recall
from fusion_backend.testing import near_misses, spellings

ALL = {p.name: p for p in patterns()}
every = pytest.mark.parametrize("pattern", ALL.values(), ids=ALL)


@pytest.fixture
def scaled_tanh():
    @Pattern
    def scaled_tanh(x: Tensor, w: Tensor, s: float) -> Tensor:
        return torch.tanh(x * w) * s

    yield scaled_tanh
    unregister("scaled_tanh")


@every
def test_spellings_are_recognised_and_near_misses_left_right(pattern):
    found = recall(pattern, count=6, misses=4)
    told = "\n".join(f"{o.spelling.source}\n{o.wrong}\n{o.reason}" for o in (*found.wrong, *found.unrecognised))
    assert not found.faults, found.faults[0].spelling.source
    assert not found.wrong, told
    assert len(found.unrecognised) <= 1, told


def test_there_are_enough_and_a_seed_repeats_them(scaled_tanh):
    made = spellings(scaled_tanh, count=60, seed=3)
    sources = [s.source for s in made]
    assert len(set(sources)) == 60
    assert sources == [s.source for s in spellings(scaled_tanh, count=60, seed=3)]
    assert sources != [s.source for s in spellings(scaled_tanh, count=60, seed=4)]


def test_a_pattern_of_the_user(scaled_tanh):
    found = recall(scaled_tanh, count=12)
    assert not (found.faults or found.unrecognised or found.wrong), found.row()
    assert found.near_misses and not any(o.same for o in found.near_misses)


def test_the_source_is_there_for_stack_traces(scaled_tanh):
    made = next(s for s in spellings(scaled_tanh) if "Model" not in s.source)
    assert "def fn(x, w):" in linecache.getlines(made.fn.__code__.co_filename)[made.fn.__code__.co_firstlineno - 1]


def test_a_false_equivalence_is_found_out(monkeypatch):
    """Were exp(-x) read as exp(x), near misses would show it."""
    monkeypatch.setitem(RULES, "aten::neg", lambda c, a, s: a("self"))
    assert recall(ALL["add_mul_exp"], count=0, misses=30).wrong


def test_near_misses_name_what_they_change(scaled_tanh):
    assert {s.words[0].partition(":")[0] for s in near_misses(scaled_tanh)} <= {"mul", "tanh", "returned too"}
