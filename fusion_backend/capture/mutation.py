"""Memory that a Dynamo graph writes to, known by the names of its calls before anything
is traced.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusion_backend.compat.torch import FakeTensor, HigherOrderOperator, pytree, storage_id

IN_PLACE = {
    "setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod",
    "imul", "ior", "ipow",
    "irshift", "isub", "itruediv", "ixor",
}  # fmt: skip

# afterwards Dynamo's value no longer tells where the tensor was before
MOVES = {"set_", "resize_", "resize_as_"}


def may_write(n: fx.Node) -> bool:
    """Does the call say that it writes into an argument, or not say what it does at all?"""
    if n.op not in ("call_function", "call_method"):
        return n.op == "call_module"
    unknown = n.meta.get("example_value") is None or "unbacked_bindings" in n.meta
    if unknown or isinstance(n.target, HigherOrderOperator) or "out" in n.kwargs:
        return True
    name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_") in IN_PLACE
    in_operator = getattr(operator, name, None) is n.target
    return name in IN_PLACE if in_operator else name.endswith("_") or bool(n.kwargs.get("inplace"))


def storages_of(value) -> set[int]:
    """Identities of the storages that tensors live in."""
    return {
        storage_id(t)
        for t in pytree.tree_leaves(value)
        if type(t) is FakeTensor and t.layout == torch.strided
    }


class Written:
    """The calls that may write, and all calls whose values live where they may write."""

    def __init__(self, gm: fx.GraphModule):
        self.writers = {n for n in gm.graph.nodes if may_write(n)}
        memory: set[int] = set()
        for n in self.writers:
            for near in (n, *n.all_input_nodes):
                memory |= storages_of(near.meta.get("example_value"))
        self.touched = {
            n
            for n in gm.graph.nodes
            if memory and memory & storages_of(n.meta.get("example_value"))
        }
        moved = any(n.op == "call_method" and n.target in MOVES for n in self.writers)
        self.touched = set(gm.graph.nodes) if moved else self.touched | self.writers
