"""Graphs that Dynamo cuts at the buckets of DistributedDataParallel, and hands over part by part.

What a part computes from numbers alone, such as a causal mask, is given to later parts as a tensor
of which nothing is known. A part that reads one computes it again, by the calls that made it.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, fx

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.predicted_writes import PredictedWrites
from fusion_backend.compat.distributed import cut_graph

# Calls with one result that depends on their arguments alone, and on no state but autocast's.
FACTORIES = {"arange", "ones", "zeros", "full", "eye", "new_ones", "new_zeros", "new_full"}
COMPUTES = {
    "add", "sub", "mul", "floordiv", "floor_divide", "mod", "remainder", "neg", "abs", "diff",
    "cumsum", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "invert", "logical_and",
    "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__",
    "where", "masked_fill", "tril", "triu", "clamp", "minimum", "maximum",
}  # fmt: skip
MOVES = {
    "getitem", "__getitem__", "view", "reshape", "expand", "broadcast_to", "unsqueeze", "squeeze",
    "transpose", "permute", "t", "flatten", "contiguous", "clone", "to", "bool", "int", "long",
    "float", "type", "repeat", "cat", "stack",
}  # fmt: skip
AUTOCAST = ("_enter_autocast", "_exit_autocast")
LAST = threading.local()


@dataclasses.dataclass
class Constant:
    """value: the tensor that later parts are given. nodes: what computes it, itself last."""

    value: Tensor
    nodes: list[fx.Node]

    @property
    def storages(self) -> set[int]:
        return storages_of(self.nodes[-1].meta["example_value"])


class Parts:
    """What the parts of one graph have computed from numbers alone so far."""

    def __init__(self, graph: weakref.ref):
        self.graph = graph
        self.known: list[Constant] = []

    @staticmethod
    def now() -> Parts | None:
        """Of the graph that this thread compiles now; None where it is whole. Those of the graph
        before are forgotten.
        """
        graph, last = cut_graph(), getattr(LAST, "parts", None)
        if graph is None:
            LAST.parts = None
        elif last is None or last.graph() is not graph:
            LAST.parts = Parts(weakref.ref(graph))
        return LAST.parts

    def compute_again(self, gm: fx.GraphModule, inputs) -> None:
        """Write into this part what it is given and an earlier one has computed from numbers."""
        if self.known:
            memory = written(gm)
            self.known = [c for c in self.known if memory is not None and not c.storages & memory]
        places = gm.graph.find_nodes(op="placeholder")
        found = [
            (place, constant)
            for place, value in zip(places, inputs, strict=True)
            for constant in self.known
            if value is constant.value and place.users
        ]
        if not found:
            return
        copies: dict[fx.Node, fx.Node] = {}
        before = next(n for n in gm.graph.nodes if n.op != "placeholder")
        with gm.graph.inserting_before(before):
            for place, constant in found:
                for n in constant.nodes:
                    if n not in copies:
                        copies[n] = gm.graph.node_copy(n, copies.__getitem__)
                place.replace_all_uses_with(copies[constant.nodes[-1]])
        gm.recompile()

    def noting(self, gm: fx.GraphModule) -> Callable[[Callable], Callable]:
        """Wraps what `gm` is compiled to: its first call, on fake tensors, has the results that
        later parts are given.
        """
        results = gm.graph.output_node().args[0]
        results = results if isinstance(results, tuple | list) else (results,)
        memory = written(gm)
        made = {} if memory is None else {i: from_numbers(n, memory) for i, n in enumerate(results)}
        made = {i: nodes for i, nodes in made.items() if nodes}
        if not made:
            return lambda compiled: compiled

        def wrap(compiled: Callable) -> Callable:
            first = [(self, made)]  # afterwards the function holds neither

            def call(*args):
                found = compiled(*args)
                if first:
                    parts, nodes = first.pop()
                    parts.known += [Constant(found[i], nodes[i]) for i in nodes]
                return found

            return call

        return wrap


def written(gm: fx.GraphModule) -> set[int] | None:
    """The storages that the graph may write to. None where it changes autocast, under which the
    same calls may compute something else.
    """
    nodes = gm.graph.nodes
    if any(getattr(n.target, "__name__", "") in AUTOCAST for n in nodes):
        return None
    writes = PredictedWrites(gm)
    # a function's `inplace` may be given by position
    writers = writes.writers | {n for n in nodes if any(a is True for a in n.args)}
    near = writes.touched | writers | {m for n in writers for m in n.all_input_nodes}
    return set().union(*(storages_of(n.meta.get("example_value")) for n in near))


def from_numbers(n: object, memory: set[int]) -> list[fx.Node] | None:
    """The nodes that compute a tensor from numbers alone, in order; None where others do, or where
    one of their results may be written to.
    """
    if not isinstance(n, fx.Node):
        return None
    found, pending = set(), [n]
    while pending:
        m = pending.pop()
        if m in found:
            continue
        value = m.meta.get("example_value")
        if not isinstance(value, Tensor) or not known_call(m) or storages_of(value) & memory:
            return None
        found.add(m)
        pending += m.all_input_nodes
    return [m for m in n.graph.nodes if m in found]


def known_call(n: fx.Node) -> bool:
    if n.op == "call_method":
        return n.target in FACTORIES | COMPUTES | MOVES
    name = getattr(n.target, "__name__", "")
    if n.op != "call_function" or name not in FACTORIES | COMPUTES | MOVES:
        return False
    return n.target in (getattr(torch, name, None), getattr(operator, name, None))
