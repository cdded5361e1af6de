"""The memory that a Dynamo graph will write to, predicted from the names of its calls before
anything is traced. A call that writes and has no such name is found by the trace (tracer.py).
"""

from __future__ import annotations

import operator

from torch import fx

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.batch_norm import running_statistics
from fusion_backend.compat.torch import HigherOrderOperator

IN_PLACE = {
    "setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod",
    "imul", "ior", "ipow",
    "irshift", "isub", "itruediv", "ixor",
}  # fmt: skip

# After one of these calls Dynamo's value no longer shows the earlier storage of the tensor.
REPLACES_STORAGE = {"set_", "resize_", "resize_as_"}


def may_write(n: fx.Node) -> bool:
    """Does the call's name say that it writes into an argument, or not say what it does?"""
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


def replaces_storage(n: fx.Node) -> bool:
    """Does a tensor get another storage there, as by x.set_(y) or x.data = y?"""
    name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    return name in REPLACES_STORAGE


class PredictedWrites:
    """`writers`: the calls that may write. `touched`: all nodes with a value in a storage that a
    writer reads or returns.
    """

    def __init__(self, gm: fx.GraphModule):
        self.writers = {n for n in gm.graph.nodes if may_write(n)}
        memory: set[int] = set()
        for n in self.writers:
            for near in (n, *n.all_input_nodes):
                memory |= storages_of(near.meta.get("example_value"))
        for n in gm.graph.nodes:
            for t in running_statistics(n):
                memory |= storages_of(t.meta.get("example_value"))
                self.writers.add(n)
        self.touched = {
            n
            for n in gm.graph.nodes
            if memory and memory & storages_of(n.meta.get("example_value"))
        }
        replaced = any(map(replaces_storage, self.writers))
        self.touched = set(gm.graph.nodes) if replaced else self.touched | self.writers
