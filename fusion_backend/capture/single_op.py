"""Calls of a Dynamo graph that are one ATen operator, written into the view without running them.

Nearly every call is one operator, and Dynamo has its result already. The call is repeated while the
tracer's mode intercepts the first operator, records it and returns Dynamo's result. If the call
then returns that same object, it consists of this operator alone. After a second operator, or any
other result, the call must be run (interpreter.py), and its operators are remembered
(call_cache.py).
"""

from __future__ import annotations

import operator
import types

import torch
from torch import fx

from fusion_backend.capture.aliases import storages_of
from fusion_backend.capture.call_cache import Argument, CallCache, Result, Step, Sym
from fusion_backend.compat.torch import (
    OpOverload,
    operators_go_to,
    pytree,
    schema_of,
    track_tensor_tree,
    without_torch_function,
)

# Functions of symbolic sizes; the tracer would write the same nodes as Dynamo.
ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.pow,
    operator.neg, torch.sym_max, torch.sym_min, torch.sym_float,
}  # fmt: skip


class NotSingleOp(Exception):
    """The call is not a single operator, or must be run."""


class SingleOps:
    """Writes calls into the view that a tracer builds. `untracked`: the values that were written
    without the tracer, by identity.
    """

    def __init__(self, mode):
        self.tracer = mode.tracer
        self.untracked: dict[int, fx.Proxy] = {}
        self.cache = CallCache()
        self.probing = False
        self.example = None  # Dynamo's result of the call that is probed
        self.call: tuple | None = None  # its operator, once it was intercepted
        self.run = operators_go_to(mode, self.intercept)

    def lower(self, n: fx.Node, args: tuple, kwargs: dict):
        """Write the call into the view. Returns Dynamo's result, or the argument that the call
        returns; None when the call must be run.
        """
        example = n.meta.get("example_value")
        if n.op == "call_function" and n.target in ARITHMETIC and isinstance(example, Sym):
            return self.write(n, [Step(n.target, args, kwargs, example)], ())
        call = self.probe(n, args, kwargs)
        if isinstance(call, tuple):
            items = example if isinstance(example, (tuple, list)) else ()
            parts = [
                Step(operator.getitem, (Result(0), i), {}, item) for i, item in enumerate(items)
            ]
            return self.write(n, [Step(*call, example), *parts], ())
        if call is None and isinstance(example, torch.Tensor):
            leaves = pytree.tree_leaves((args, kwargs))
            steps = self.cache.steps.get(self.cache.key(n, leaves))
            return None if steps is None else self.write(n, steps, leaves)
        return call

    def remember(self, n: fx.Node, args: tuple, kwargs: dict, traced: list[fx.Node], out) -> None:
        """Remember, for the next equal call, the nodes that this one was traced into."""
        if not isinstance(out, torch.Tensor):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        arguments: dict[fx.Node, Argument] = {}
        for i, leaf in enumerate(leaves):
            proxy = self.proxy_of(leaf) if isinstance(leaf, (torch.Tensor, *Sym)) else None
            if isinstance(proxy, fx.Proxy):
                arguments.setdefault(proxy.node, Argument(i))
        proxy = self.proxy_of(out)
        key = self.cache.key(n, leaves)
        if key is not None and isinstance(proxy, fx.Proxy):
            self.cache.remember(key, traced, proxy.node, arguments)

    # Finding the operator.

    def intercept(self, op, types, args=(), kwargs=None):
        """The tracer's mode calls this for every operator. While a call is probed, its first
        operator is recorded and gets Dynamo's result; otherwise the operator runs.
        """
        if not self.probing:
            return self.run(op, types, args, kwargs)
        if self.call is not None or not isinstance(op, OpOverload) or schema_of(op).is_mutable:
            raise NotSingleOp
        self.call = (op, args, kwargs or {})
        return self.example

    def probe(self, n: fx.Node, args: tuple, kwargs: dict):
        """(operator, args, kwargs); or the argument that is returned as it is; or None."""
        example = n.meta.get("example_value")
        known = isinstance(example, (torch.Tensor, *Sym)) or are_tensors(example)
        if not known or not may_be_single_op(n, args):
            return None
        self.example, self.call, self.probing = example, None, True
        try:
            function = n.target if n.op == "call_function" else getattr(type(args[0]), n.target)
            with without_torch_function():
                out = function(*args, **kwargs)
        except Exception:  # a call of several operators may raise anything; it is run instead
            return None
        finally:
            self.probing = False
        leaves = pytree.tree_leaves((args, kwargs))
        if self.call is None:
            return next(
                (leaf for leaf in leaves if leaf is out and isinstance(leaf, torch.Tensor)), None
            )
        return self.call if self.is_result(out, leaves) else None

    def is_result(self, out, leaves: list) -> bool:
        """Does the call return the object that was given as its operator's result?"""
        example = self.example
        if are_tensors(example):
            same_length = isinstance(out, (tuple, list)) and len(out) == len(example)
            return same_length and all(o is e for o, e in zip(out, example, strict=True))
        device = self.call[2].get("device")
        # a default that a torch function mode would have set
        if device is not None and device != example.device:
            return False
        if isinstance(example, Sym) and isinstance(out, Sym) and out.node is example.node:
            return True
        if out is example:
            return True
        # torch.zeros and similar functions wrap the operator's result in a new object.
        factory = not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return (
            factory and isinstance(out, torch.Tensor) and storages_of(out) == storages_of(example)
        )

    # Writing operators.

    def write(self, n: fx.Node, steps: list[Step], leaves):
        """Write the operators of a call, and return Dynamo's result for it. None when an argument
        is unknown in the view.
        """

        def node_of(a):
            if isinstance(a, Result):
                return a
            return self.node_of(leaves[a.i] if isinstance(a, Argument) else a)

        try:
            arguments = [fx.node.map_aggregate((step.args, step.kwargs), node_of) for step in steps]
        except LookupError:
            return None
        written: list[fx.Node] = []
        for step, operands in zip(steps, arguments, strict=True):
            written.append(self.create(n, step, operands, written))
        return self.give(n.meta["example_value"], written)

    def create(self, n: fx.Node, step: Step, arguments: tuple, results: list[fx.Node]) -> fx.Node:
        """The node of one step, described as the Dynamo node `n` is."""
        if results:
            arguments = fx.node.map_aggregate(
                arguments, lambda a: results[a.i] if isinstance(a, Result) else a
            )
        one = isinstance(step.target, OpOverload)
        name = step.target.overloadpacket.__name__ if one else None
        node = self.tracer.graph.create_node("call_function", step.target, *arguments, name)
        node.meta |= {key: item for key, item in n.meta.items() if key != "example_value"}
        node.meta["val"] = step.value
        return node

    def give(self, example, written: list[fx.Node]):
        """Make Dynamo's result, `example`, the value of the last node of a call. If it is a tuple,
        its items are the values of all nodes but the first.
        """
        if isinstance(example, Sym):
            proxy = fx.Proxy(written[-1], self.tracer)
            return track_tensor_tree(example, proxy, constant=None, tracer=self.tracer)
        if isinstance(example, torch.Tensor):
            written[-1].meta["val"] = example  # a remembered step has the first call's value
        several = isinstance(example, (tuple, list))
        values, nodes = (example, written[1:]) if several else ((example,), written[-1:])
        for value, node in zip(values, nodes, strict=True):
            self.untracked[id(value)] = fx.Proxy(node, self.tracer)
        return example

    def node_of(self, a):
        """The node of an operator's argument in the view, or the constant that it is. LookupError
        where the view has no node for it.
        """
        if isinstance(a, Sym):
            if a.node.constant is not None:
                return a.node.constant
            if a.node.expr.is_number:
                raise LookupError
        elif not isinstance(a, torch.Tensor):
            return a
        proxy = self.proxy_of(a)
        if not isinstance(proxy, fx.Proxy):
            raise LookupError
        return proxy.node

    def proxy_of(self, value):
        """The proxy of a value that was written here, or what the tracer has for it."""
        known = self.untracked.get(id(value))
        return self.tracer.unwrap_proxy(value) if known is None else known

    def track(self, values) -> None:
        """Let the tracer track values that were written without it."""
        for value in pytree.tree_leaves(values):
            proxy = self.untracked.pop(id(value), None)
            if proxy is not None:
                track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)


def are_tensors(value) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in value)


def may_be_single_op(n: fx.Node, args: tuple) -> bool:
    """May the call be repeated with another result for its first operator?

    Calls of torch choose their operators by their arguments alone. The exception is indexing, which
    looks at the result of its first operator to see whether the next is needed. Functions of the
    user may look at any value.
    """
    if n.op == "call_method":
        return isinstance(args[0], torch.Tensor)
    if n.target is operator.getitem:
        return isinstance(args[0], torch.Tensor) and index_operators(args[0], args[1]) == 1
    return (
        not isinstance(n.target, types.FunctionType)
        or n.target.__module__.partition(".")[0] == "torch"
    )


def index_operators(x: torch.Tensor, index) -> int:
    """The largest number of operators that `x[index]` can be. All tensors in the index together are
    one operator; `:` is none if the sizes of `x` are numbers.
    """
    index = index if isinstance(index, tuple) else (index,)
    static = all(type(size) is int for size in x.shape)
    tensors = any(isinstance(i, torch.Tensor) for i in index)
    views = [
        i
        for i in index
        if i is not Ellipsis and not isinstance(i, torch.Tensor) and not (static and is_all(i))
    ]
    # a bool is an unsqueeze and an index
    return tensors + len(views) + sum(isinstance(i, bool) for i in views)


def is_all(i) -> bool:
    """Is this index `:`?"""
    return isinstance(i, slice) and i.start is None and i.stop is None and i.step is None
