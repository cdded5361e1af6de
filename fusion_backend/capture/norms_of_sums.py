"""The two batch norms of a sum, one behind the other.

A residual block with a projection beside it normalises twice and adds: relu(bn(conv(h)) +
bn(conv(x))). One kernel for both needs the statistics of both, but in the user's code the running
statistics of the first are written before the second convolution. Inside `norms_together` the first
norm stands right before the second, if no call in between has anything to do with it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.batch_norm import running_statistics
from fusion_backend.capture.predicted_writes import replaces_storage
from fusion_backend.compat.memory import DATA
from fusion_backend.compat.torch import FakeTensor, HigherOrderOperator, pytree

SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
UNKNOWN = object()


@contextlib.contextmanager
def norms_together(gm: fx.GraphModule) -> Iterator[None]:
    """At the end, the nodes of a Dynamo graph and of the bodies inside are in their own order
    again.
    """
    moved: list[tuple[fx.Node, fx.Node]] = []  # each norm, and the node that was behind it
    try:
        for body in gm.modules():
            if isinstance(body, fx.GraphModule) and not any(map(replaced, body.graph.nodes)):
                for first, second in sums_of_norms(body.graph):
                    if first.next is not second and may_move(first, second):
                        moved.append((first, first.next))
                        second.prepend(first)
        yield
    finally:
        for norm, behind in reversed(moved):
            behind.prepend(norm)


def replaced(n: fx.Node) -> bool:
    """Is the storage replaced there, or hidden? The example values know only the last one."""
    return n.target is DATA or replaces_storage(n)


def sums_of_norms(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The norms of each sum of two, in their order."""
    order, found = {n: i for i, n in enumerate(graph.nodes)}, []
    for n in order:
        call = n.op in ("call_function", "call_method") and n.target in SUMS
        if call and len(n.args) == 2 and not n.kwargs:
            norms = {a for a in n.args if isinstance(a, fx.Node) and running_statistics(a)}
            if len(norms) == 2:
                first, second = sorted(norms, key=order.__getitem__)
                found.append((first, second))
    return found


def may_move(norm: fx.Node, second: fx.Node) -> bool:
    """Are all calls up to the second norm ordinary ones, of which none touches memory that the
    first one reads or writes? Names do not tell everything that a call writes to.
    """
    touched = memory_of(norm)
    written = set().union(*map(memory_of, running_statistics(norm)))
    n = norm.next
    while n is not second:
        if not is_ordinary(n) or not touched.isdisjoint(memory_of(n)):
            return False
        n = n.next
    return bool(written) and written.isdisjoint(memory_of(second))


def is_ordinary(n: fx.Node) -> bool:
    """Is it a call of which all values are plain tensors, or no tensors at all?"""
    values = [a.meta.get("example_value", UNKNOWN) for a in (n, *n.all_input_nodes)]
    tensors = (v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    plain = all(type(t) is FakeTensor and t.layout == torch.strided for t in tensors)
    call = n.op in ("call_function", "call_method")
    known = all(v is not UNKNOWN for v in values)
    return call and known and plain and not isinstance(n.target, HigherOrderOperator)


def memory_of(n: fx.Node) -> set[int]:
    """The storages that a node reads or makes."""
    return storages_of([a.meta.get("example_value") for a in (n, *n.all_input_nodes)])
