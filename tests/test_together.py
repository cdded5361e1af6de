"""Which answer ranks take about a graph whose kernels wait for other ranks. What two processes do
with it is in tests/ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusion_backend import Op
from fusion_backend.frontends import together
from fusion_backend.frontends.together import ALL, Waiting, answer, failure_of
from fusion_backend.ops.registry import unregister
from fusion_backend.reporting.reject import PatternError

TWO = Waiting("a graph", [0, 1])


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(together, "WAIT_S", 0.2)
    return dist.HashStore()


def test_an_answer_is_that_of_all_ranks_and_stays(store):
    store.set("fusion/together/a graph/1", "")
    assert answer(store, 0, TWO) == ALL
    store.set(failure_of(1), "no memory")
    assert answer(store, 1, TWO) == ALL
    assert answer(store, 0, TWO) == ALL
    other = Waiting("another graph", [0, 1])
    assert answer(store, 0, other) == "rank 1 has failed to compile a graph: no memory"


def test_a_rank_is_waited_for_but_not_for_ever(store):
    late = answer(store, 0, TWO)
    assert late == "rank 1 has not compiled the graph after 0 seconds"
    assert answer(store, 1, TWO) == late  # which comes later, and runs what the others run


def test_nobody_waits_once_there_is_an_answer(store, monkeypatch):
    store.set("fusion/together/a graph/answer", "rank 1 is late")
    monkeypatch.setattr(together.time, "sleep", lambda s: pytest.fail("waits"))
    assert answer(store, 0, TWO) == "rank 1 is late"


def test_ranks_outside_of_the_group_do_not_matter(store):
    store.set(failure_of(2), "no memory")
    store.set("fusion/together/a graph/1", "")
    assert answer(store, 0, TWO) == ALL


def test_nothing_is_told_where_there_is_one_process():
    together.tell_failure("no memory")
    with together.together(torch.fx.symbolic_trace(lambda x: x.sin()), None):
        pass


@pytest.mark.parametrize("group, right", [("place", True), ("x", False), ("size", False)])
def test_the_group_of_an_op_is_an_argument_that_is_a_text(group, right):
    def summed_there(x: Tensor, size: int, place: str) -> Tensor:
        return x * size

    if right:
        assert Op(summed_there, group=group).group == group
        unregister("summed_there")
    else:
        with pytest.raises(PatternError, match="group is '.*'; use None, 'place'"):
            Op(summed_there, group=group)
