"""Graphs that Dynamo cuts at the buckets of DistributedDataParallel, and hands over part by part.

A value that one part computes from constants, such as a causal mask, reaches later parts as an
input of which nothing is known. A part that reads it recomputes it by the same calls.
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
from fusion_backend.capture.interpreter import AUTOCAST
from fusion_backend.compat.distributed import cut_graph
from fusion_backend.compat.torch import FakeTensor

OPERATORS = {
    "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "abs", "lt", "le", "gt", "ge", "eq",
    "ne", "and_", "or_", "xor", "invert", "getitem",
}  # fmt: skip
# Calls that write to nothing and whose single result depends only on their arguments, on defaults
# (dtype, device), which are the same for all parts of a graph, and on autocast. Dynamo writes
# some operators as methods, such as `__eq__`.
KNOWN = OPERATORS | {f"__{name.strip('_')}__" for name in OPERATORS} | {
    "arange", "ones", "zeros", "full", "eye", "new_ones", "new_zeros", "new_full",
    "div", "floor_divide", "remainder", "diff", "cumsum",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor",
    "where", "masked_fill", "tril", "triu", "clamp", "minimum", "maximum",
    "view", "reshape", "expand", "broadcast_to", "unsqueeze", "squeeze",
    "transpose", "permute", "t", "flatten", "contiguous", "clone", "to", "bool", "int", "long",
    "float", "type", "repeat", "cat", "stack",
}  # fmt: skip
# Calls that never write to masks or positions.
READS = {
    "scaled_dot_product_attention", "softmax", "log_softmax", "embedding", "matmul", "bmm",
    "einsum", "sin", "cos", "exp",
}  # fmt: skip
LAST = threading.local()


@dataclasses.dataclass
class Constant:
    """value: the tensor that later parts get as an input. nodes: the nodes that compute it, its own
    last.
    """

    value: Tensor
    nodes: list[fx.Node]

    @property
    def storages(self) -> set[int]:
        return storages_of(self.nodes[-1].meta["example_value"])


class Parts:
    """The values that the parts of one graph have computed from constants so far."""

    def __init__(self, graph: weakref.ref):
        self.graph = graph
        self.known: list[Constant] = []

    @staticmethod
    def now() -> Parts | None:
        """The parts of the graph that this thread compiles now; None if it is not cut. The parts of
        the previous graph are dropped.
        """
        graph, last = cut_graph(), getattr(LAST, "parts", None)
        if graph is None:
            LAST.parts = None
        elif last is None or last.graph() is not graph:
            LAST.parts = Parts(weakref.ref(graph))
        return LAST.parts

    def recompute(self, gm: fx.GraphModule, inputs) -> None:
        """Replace the inputs of this part that an earlier one has computed from constants."""
        if not self.known:
            return
        memory = unknown_memory(gm)
        self.known = [c for c in self.known if memory is not None and not c.storages & memory]
        # a result that shares memory with an input must still do so
        results = storages_of([n.meta.get("example_value") for n in output_of(gm)])
        places = gm.graph.find_nodes(op="placeholder")
        found = [
            (place, constant)
            for place, value in zip(places, inputs, strict=True)
            for constant in self.known
            if value is constant.value and place.users and not constant.storages & results
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

    def observed(self, gm: fx.GraphModule) -> Callable[[Callable], Callable]:
        """A wrapper for what `gm` is compiled to. Dynamo's first call of it, on fake tensors,
        returns the very tensors that become the inputs of later parts.
        """
        memory = unknown_memory(gm)
        made = {}
        if memory is not None:
            (results,) = gm.graph.output_node().args
            for i, n in enumerate(results if isinstance(results, tuple | list) else (results,)):
                if nodes := from_constants(n, memory):
                    made[i] = nodes
        if not made:
            return lambda compiled: compiled

        def wrap(compiled: Callable) -> Callable:
            first = [(self, made)]  # afterwards the function holds neither

            def call(*args):
                found = compiled(*args)
                if first:
                    parts, nodes = first.pop()
                    given = {i: found[i] for i in nodes if isinstance(found[i], FakeTensor)}
                    parts.known += [Constant(value, nodes[i]) for i, value in given.items()]
                return found

            return call

        return wrap


def unknown_memory(gm: fx.GraphModule) -> set[int] | None:
    """The storages that are read or returned by calls which may write to them. None if the graph
    changes autocast, because the same calls may then compute something else.
    """
    called = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    if any(getattr(n.target, "__name__", "") in AUTOCAST for n in called):
        return None
    near = {m for n in called if not is_call(n, KNOWN | READS) for m in (n, *n.all_input_nodes)}
    return storages_of([n.meta.get("example_value") for n in near])


def output_of(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.output_node().all_input_nodes


def from_constants(n: object, memory: set[int]) -> list[fx.Node] | None:
    """The nodes that compute a tensor from constants, in order. None if it depends on an input, on
    a call that is not KNOWN, or on a tensor in this memory.
    """
    if not isinstance(n, fx.Node):
        return None
    found, pending = set(), [n]
    while pending:
        m = pending.pop()
        if m in found:
            continue
        value = m.meta.get("example_value")
        if not isinstance(value, Tensor) or not is_call(m, KNOWN) or storages_of(value) & memory:
            return None
        found.add(m)
        pending += m.all_input_nodes
    return [m for m in n.graph.nodes if m in found]


def is_call(n: fx.Node, names: set[str]) -> bool:
    """Is the node a call of one of these, of torch, a tensor or `operator`, that returns what it
    computes?
    """
    if "out" in n.kwargs:
        return False
    if n.op == "call_method":
        return n.target in names
    name = getattr(n.target, "__name__", "")
    homes = (torch, operator, torch.nn.functional)
    return (
        n.op == "call_function"
        and name in names
        and any(n.target is getattr(home, name, None) for home in homes)
    )
