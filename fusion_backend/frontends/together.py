"""Kernels that wait for other ranks run only where all of those have compiled the graph.

A rank that cannot compile a graph with our sites runs it as plain Inductor would, and there the
process group computes the sums over ranks. The others would wait for that rank in their kernels. So
each rank says in the key-value store of torch.distributed that it has compiled such a graph, or
that it has failed, and all take the same answer. No collective is called. The answer holds for all
later graphs with the same sites, because not all ranks may compile these again.
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
from fusion_backend.compat.symmetric_memory import process_group
from fusion_backend.compat.torch import RestartAnalysis, schema_of
from fusion_backend.ops.registry import OPS
from fusion_backend.reporting.records import GraphRecord

WAIT_S, POLL_S = 240.0, 0.02  # less than NCCL waits for a rank by default
ALL = "all ranks have compiled it"


class Apart(RuntimeError):
    """Not all ranks have compiled the graph: each runs it as plain Inductor would."""


class Expected(RuntimeError):
    """A rank cannot compile what it has compiled before, and the others run the kernels."""


class Waiting(NamedTuple):
    """`name`: of all graphs with these sites. `ranks`: those that the kernels wait for."""

    name: str
    ranks: list[int]


@contextlib.contextmanager
def together(gm: fx.GraphModule, record: GraphRecord) -> Iterator[bool]:
    """Inside, a graph is compiled. Afterwards wait for the ranks that its kernels wait for. Yields
    whether there are some. Raises Apart where one of them has not compiled the graph.
    """
    store, rank = default_store()
    found = waiting(gm, record) if store is not None else None
    if found is None:
        yield False
        return
    try:
        yield True
    except RestartAnalysis:
        raise
    except Exception as error:
        if known(store, found) == ALL:
            raise Expected(
                f"the other ranks run kernels that wait for this one, which compiled this graph "
                f"before and cannot now: {error}"
            ) from error
        raise
    told = answer(store, rank, found)
    if told != ALL:
        raise Apart(told)


def tell_failure(why: str) -> None:
    """Tell the other ranks that this one runs a graph as plain Inductor would. Where nobody listens
    any more, nobody waits either.
    """
    store, rank = default_store()
    if store is not None:
        with contextlib.suppress(RuntimeError):
            store.set(failure_of(rank), why)


def waiting(gm: fx.GraphModule, record: GraphRecord) -> Waiting | None:
    """The sites of a graph whose kernels wait for other ranks; None where there is none. What
    differs between ranks is no part of their name.
    """
    calls, names, ranks = [], set(), set()
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for n in (n for graph in graphs for n in graph.nodes if n.op == "call_function"):
        space, _, rest = str(n.target).partition(".")
        op = OPS.get(rest.partition(".")[0]) if space == "fusion" else None
        if op is None or op.group is None or n.kwargs.get("forward") != "kernel":
            continue
        group = n.args[[a.name for a in schema_of(n.target).arguments].index(op.group)]
        calls.append(f"{op.name} {[a for a in n.args if not isinstance(a, fx.Node)]}")
        names.add(n.meta["fusion"])
        ranks |= {*dist.get_process_group_ranks(process_group(group))}
    if not calls:
        return None
    sizes = sorted(s.bytes_saved or 0 for s in record.sites if s.fused and s.pattern in names)
    text = f"{sorted(calls)} {sizes} {sorted(ranks)}"
    return Waiting(hashlib.sha256(text.encode()).hexdigest()[:24], sorted(ranks))


def answer(store, rank: int, found: Waiting) -> str:
    """ALL, or why not: the answer that was written first, of whichever rank."""
    place = f"fusion/together/{found.name}"
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
        else:
            time.sleep(POLL_S)
    return store.compare_set(f"{place}/answer", "", told).decode()


def known(store, found: Waiting) -> str:
    """The answer, if there is one; else empty."""
    name = f"fusion/together/{found.name}/answer"
    return store.get(name).decode() if store.check([name]) else ""


def failure_of(rank: int) -> str:
    return f"fusion/together/failed/{rank}"
