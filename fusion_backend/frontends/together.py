"""Kernels that wait for other ranks run only where all of those have compiled the graph.

A rank that cannot compile a graph with our sites runs it as plain Inductor would, and there the
process group computes the sums over ranks. The others would wait for that rank in their kernels. So
each rank says in the key-value store of torch.distributed that it has compiled such a graph, or
that it has failed, and all take the same answer. No collective is called. The answer holds for all
later graphs with the same sites, because not all ranks may compile these.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import fx

from fusion_backend.compat.distributed import default_store
from fusion_backend.compat.inductor import undone_on_failure
from fusion_backend.compat.symmetric_memory import process_group
from fusion_backend.compat.torch import schema_of
from fusion_backend.frontends.verify import communication
from fusion_backend.ops.registry import OPS
from fusion_backend.reporting.records import GraphRecord

WAIT_S, POLL_S = 240.0, 0.02  # less than NCCL waits for a rank by default
ALL = "all ranks have compiled it"
PROMISED: dict[str, object] = {}  # the names of graphs that all compiled -> the store of the job


class NotCompiledByAllRanks(RuntimeError):
    """Each rank runs the graph as plain Inductor would."""


class CannotFallBack(RuntimeError):
    """A rank cannot compile a graph, and the others may run it with kernels that wait for this
    rank.
    """


class Waiting(NamedTuple):
    """`name`: of all graphs with these sites. `ranks`: those that the kernels wait for."""

    name: str
    ranks: list[int]


@contextlib.contextmanager
def together(gm: fx.GraphModule, record: GraphRecord) -> Iterator[None]:
    """Inside, a graph is compiled. Afterwards wait for the ranks that its kernels wait for. Raises
    NotCompiledByAllRanks where one of them has not compiled it, and CannotFallBack where the store
    fails after this rank has said that it has.
    """
    store, rank = default_store()
    found = waiting(gm, record) if store is not None else None
    if found is None:
        yield
        return
    with undone_on_failure():  # plain Inductor compiles the graph after a refusal
        yield
        told = answer(store, rank, found)
        if told != ALL:
            raise NotCompiledByAllRanks(told)
    PROMISED[found.name] = store


def tell_failure(gm: fx.GraphModule, error: Exception, told: str) -> None:
    """Before a rank runs a graph as plain Inductor would, tell the other ranks. Raises
    CannotFallBack if these may run it with kernels that wait: if all have compiled some such graph,
    and this one communicates, too.
    """
    store, rank = default_store()
    if store is None or isinstance(error, NotCompiledByAllRanks):
        return
    if isinstance(error, CannotFallBack):
        raise error
    if any(of is store for of in PROMISED.values()) and communication(gm):
        raise CannotFallBack(
            "the other ranks may run kernels that wait for this rank, which has compiled a graph "
            f"with such kernels before and cannot compile this one: {told}"
        ) from error
    with contextlib.suppress(RuntimeError):  # where nobody listens any more, nobody waits
        store.set(failure_of(rank), told)


def waiting(gm: fx.GraphModule, record: GraphRecord) -> Waiting | None:
    """The sites of a graph whose kernels wait for other ranks; None where there is none. What
    differs between ranks is no part of their name.
    """
    calls, names, groups = [], set(), set()
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for n in (n for graph in graphs for n in graph.nodes if n.op == "call_function"):
        space, _, rest = str(n.target).partition(".")
        op = OPS.get(rest.partition(".")[0]) if space == "fusion" else None
        if op is None or op.group is None or n.kwargs.get("forward") != "kernel":
            continue
        group = n.args[[a.name for a in schema_of(n.target).arguments].index(op.group)]
        calls.append(f"{op.name} {[a for a in n.args if not isinstance(a, fx.Node)]}")
        names.add(n.meta.get("fusion"))
        groups.add(group)
    if not calls:
        return None
    if len(groups) > 1:  # each rank may have other ones
        raise NotCompiledByAllRanks("it has kernels that wait for several process groups")
    ranks = dist.get_process_group_ranks(process_group(groups.pop()))
    sizes = sorted(s.bytes_saved or 0 for s in record.sites if s.fused and s.pattern in names)
    text = f"{sorted(calls)} {sizes} {sorted(ranks)}"
    return Waiting(hashlib.sha256(text.encode()).hexdigest()[:24], sorted(ranks))


def answer(store, rank: int, found: Waiting) -> str:
    """ALL, or why not: the answer that was written first, of whichever rank. Raises CannotFallBack
    where the store fails.
    """
    place = f"fusion/together/{found.name}"
    try:
        store.set(f"{place}/{rank}", "")
        until, told = time.monotonic() + WAIT_S, ""
        while not told and not (told := known(store, found)):
            failures = [r for r in found.ranks if store.check([failure_of(r)])]
            late = [r for r in found.ranks if not store.check([f"{place}/{r}"])]
            if failures:
                why = store.get(failure_of(failures[0])).decode()
                told = f"rank {failures[0]} has failed to compile a graph: {why}"
            elif not late:
                told = ALL
            elif time.monotonic() > until:
                told = f"rank {late[0]} has not compiled the graph after {WAIT_S:.0f} seconds"
                store.set(failure_of(late[0]), "it was late")  # nobody waits for it again
            else:
                time.sleep(POLL_S)
        return store.compare_set(f"{place}/answer", "", told).decode()
    except RuntimeError as error:
        raise CannotFallBack(f"the store of torch.distributed failed: {error}") from error


def known(store, found: Waiting) -> str:
    """The answer, if there is one; else empty."""
    name = f"fusion/together/{found.name}/answer"
    return store.get(name).decode() if store.check([name]) else ""


def failure_of(rank: int) -> str:
    return f"fusion/together/failed/{rank}"
