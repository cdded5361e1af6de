"""Which answer ranks take about a graph whose kernels wait for other ranks. What two processes do
with it is in tests/ranks.
"""

import types

import pytest
import torch
import torch.distributed as dist
from fusion_backend.patterns.all_reduce_norm import all_reduce_norm
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_backend import Op
from fusion_backend.frontends import together
from fusion_backend.frontends.together import (
    ALL,
    CannotFallBack,
    NotCompiledByAllRanks,
    Waiting,
    answer,
    failure_of,
    tell_failure,
    waiting,
)
from fusion_backend.measure import agree
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import unregister
from fusion_backend.reporting.records import GraphRecord, Site
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


def test_whoever_was_late_is_not_waited_for_again(store, monkeypatch):
    assert "after 0 seconds" in answer(store, 0, TWO)
    monkeypatch.setattr(together, "WAIT_S", 3.0)
    assert answer(store, 0, Waiting("another graph", [0, 1])).endswith("graph: it was late")


def test_a_store_that_fails_is_no_reason_to_fall_back(store, monkeypatch):
    """The others may have read that this rank has compiled the graph."""
    broken = types.SimpleNamespace(set=store.set, check=store.check)  # no compare_set
    store.set("fusion/together/a graph/1", "")

    def fails(*given):
        raise RuntimeError("Broken pipe")

    broken.compare_set = fails
    with pytest.raises(CannotFallBack, match="Broken pipe"):
        answer(broken, 0, TWO)


def sums(*groups, rows=(64,), eps=1e-6, **providers) -> tuple[fx.GraphModule, GraphRecord]:
    """A graph with a sum over the ranks of each of these process groups, and its report."""
    operator_of(all_reduce_norm)
    graph, record = fx.Graph(), GraphRecord(0)
    x, w = graph.placeholder("x"), graph.placeholder("w")
    for group in groups:
        given = (x, x, w, None, 1.0, eps, "rms", group)
        n = graph.call_function(
            torch.ops.fusion.all_reduce_norm.default, given, {"forward": "kernel", **providers}
        )
        n.meta["fusion"] = "all_reduce_add_rms_norm"
    graph.output(n)
    for size in rows:
        site = Site("all_reduce_add_rms_norm", "", True, "", bytes_saved=size)
        record.sites.append(site)
    return fx.GraphModule({}, graph), record


@pytest.fixture
def two_ranks(store, monkeypatch):
    """This process is the first of two."""
    monkeypatch.setattr(together, "process_group", lambda group: group)
    monkeypatch.setattr(together.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(together, "default_store", lambda: (store, 0))
    monkeypatch.setattr(together, "PROMISED", {})
    return store


def test_graphs_have_one_name_if_their_sites_are_alike(two_ranks):
    one = waiting(*sums("0"))
    assert one == waiting(*sums("0")) and one.ranks == [0, 1]
    others = [
        sums("1"), sums("0", "0"), sums("0", rows=(32,)), sums("0", eps=1e-5),
    ]  # fmt: skip
    assert len({one.name, *(waiting(*other).name for other in others)}) == 5


def test_only_kernels_wait(two_ranks):
    assert waiting(*sums("0", forward="reference")) is None
    with together.together(*sums("0", forward="reference")):
        pass
    assert not two_ranks.check(["fusion/together/failed/0"]) and not together.PROMISED


def test_several_groups_are_left_to_plain_inductor(two_ranks):
    """Rank 1 may be in a group that rank 0 does not know."""
    with pytest.raises(NotCompiledByAllRanks, match="several process groups"):
        with together.together(*sums("0", "1")):
            pytest.fail("compiled")


def test_a_rank_waits_after_it_has_compiled(two_ranks):
    with pytest.raises(NotCompiledByAllRanks, match="rank 1 has not compiled"):
        with together.together(*sums("0")):
            pass


def test_a_refusal_leaves_no_trace_of_the_compilation(two_ranks):
    """Plain Inductor compiles the graph next."""
    context = TracingContext(FakeTensorMode())
    modules = context.module_context.nn_modules
    with tracing(context), pytest.raises(NotCompiledByAllRanks):
        with together.together(*sums("0")):
            modules["norm"] = torch.nn.Identity()
    assert not modules


@pytest.mark.parametrize("promised", [False, True])
def test_a_rank_falls_back_unless_others_may_wait_for_it(promised, two_ranks, monkeypatch):
    gm, record = sums("0")
    if promised:
        two_ranks.set(f"fusion/together/{waiting(gm, record).name}/1", "")
        with together.together(gm, record):
            pass
    monkeypatch.setattr(together, "communication", lambda gm: "a sum" if gm == "sums" else "")
    error = RuntimeError("no compiler here")
    tell_failure("computes alone", error, "RuntimeError: no compiler here")
    assert two_ranks.get(failure_of(0)) == b"RuntimeError: no compiler here"
    if promised:
        with pytest.raises(CannotFallBack, match="no compiler here"):
            tell_failure("sums", error, "RuntimeError: no compiler here")
    else:
        tell_failure("sums", error, "RuntimeError: no compiler here")


def test_a_rank_that_follows_another_has_not_failed(two_ranks):
    tell_failure("sums", NotCompiledByAllRanks("rank 1 is late"), "")
    assert not two_ranks.check([failure_of(0)])
    with pytest.raises(CannotFallBack):
        tell_failure("sums", CannotFallBack("the store failed"), "")


def test_nothing_is_told_where_there_is_one_process(monkeypatch):
    monkeypatch.setattr(together, "waiting", lambda *given: pytest.fail("looked at"))
    monkeypatch.setattr(together, "default_store", lambda: (None, 0))
    with together.together(*sums("0")):
        pass
    tell_failure("sums", RuntimeError("no memory"), "no memory")


def test_what_has_an_answer_is_not_claimed_again(store, monkeypatch):
    """The rank that measured a class does not measure it again for another graph."""
    monkeypatch.setattr(agree, "default_store", lambda: (store, 0))
    ranks = agree.Ranks()
    assert ranks.claim("a class") and ranks.claim("a class")
    assert ranks.publish("a class", "faster") == "faster"
    assert not ranks.claim("a class") and ranks.wait("a class", "late", 0.0) == "faster"


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
