"""Calls written into the view as the ATen operators that they are, without running them.

Nearly every call of a Dynamo graph is one operator, and Dynamo has its result already. The call is
made once more; the first operator that comes out of it is noted and given Dynamo's result for its
own. If the call then returns that very result, the operator is all there was to it. After a second
operator, or any other result, the call must be run (capture.py), and what it becomes is remembered
(recipes.py).
"""

from __future__ import annotations

import operator
import types

import torch
from torch import fx

from fusion_backend.capture.call_cache import Given, Made, Recipes, Step, Sym
from fusion_backend.capture.mutation import storages_of
from fusion_backend.compat.torch import (
    OpOverload,
    operators_go_to,
    pytree,
    schema_of,
    track_tensor_tree,
    without_torch_function,
)

# Between symbolic sizes; what Dynamo writes is what the tracer would write.
ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.pow,
    operator.neg, torch.sym_max, torch.sym_min, torch.sym_float,
}  # fmt: skip


class NotOne(Exception):
    """The call is not one operator, or not one that may be left out."""


class Lowering:
    """The tracer of one view, and the values that it has not heard of."""

    def __init__(self, mode):
        self.tracer = mode.tracer
        self.untracked: dict[int, fx.Proxy] = {}
        self.recipes = Recipes()
        self.asking = False
        self.example = None
        self.call: tuple | None = None
        self.run = operators_go_to(mode, self.arrived)

    def lower(self, n: fx.Node, args: tuple, kwargs: dict):
        """The result of the call, which is Dynamo's or an argument; None when the call
        must be run.
        """
        if (
            n.op == "call_function"
            and n.target in ARITHMETIC
            and isinstance(n.meta.get("example_value"), Sym)
        ):
            return self.write(n, [Step(n.target, args, kwargs, n.meta["example_value"])], ())
        call = self.ask(n, args, kwargs)
        if isinstance(call, tuple):
            example = n.meta["example_value"]
            items = example if isinstance(example, (tuple, list)) else ()
            parts = [Step(operator.getitem, (Made(0), i), {}, item) for i, item in enumerate(items)]
            return self.write(n, [Step(*call, example), *parts], ())
        if call is None and isinstance(n.meta.get("example_value"), torch.Tensor):
            leaves = pytree.tree_leaves((args, kwargs))
            steps = self.recipes.known.get(self.recipes.key(n, leaves))
            return None if steps is None else self.write(n, steps, leaves)
        return call

    def learn(self, n: fx.Node, args: tuple, kwargs: dict, new: list[fx.Node], out) -> None:
        """The call was run and has become `new`."""
        if not isinstance(out, torch.Tensor):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        given: dict[fx.Node, Given] = {}
        for i, leaf in enumerate(leaves):
            proxy = self.proxy_of(leaf) if isinstance(leaf, (torch.Tensor, *Sym)) else None
            if isinstance(proxy, fx.Proxy):
                given.setdefault(proxy.node, Given(i))
        proxy = self.proxy_of(out)
        key = self.recipes.key(n, leaves)
        if key is not None and isinstance(proxy, fx.Proxy):
            self.recipes.learn(key, new, proxy.node, given)

    def arrived(self, op, types, args=(), kwargs=None):
        """An operator has come to the tracer."""
        if not self.asking:
            return self.run(op, types, args, kwargs)
        if self.call is not None or not isinstance(op, OpOverload) or schema_of(op).is_mutable:
            raise NotOne
        self.call = (op, args, kwargs or {})
        return self.example

    def ask(self, n: fx.Node, args: tuple, kwargs: dict):
        """(operator, args, kwargs); or the argument that is returned as it is; or None."""
        example = n.meta.get("example_value")
        tensors = isinstance(example, (tuple, list)) and all(
            isinstance(e, torch.Tensor) for e in example
        )
        if not (tensors or isinstance(example, (torch.Tensor, *Sym))) or not may_be_one(n, args):
            return None
        self.example, self.call, self.asking = example, None, True
        try:
            function = n.target if n.op == "call_function" else getattr(type(args[0]), n.target)
            with without_torch_function():
                out = function(*args, **kwargs)
        except Exception:  # whatever it is, running the call will tell
            return None
        finally:
            self.asking = False
        leaves = pytree.tree_leaves((args, kwargs))
        if self.call is None:
            return next(
                (leaf for leaf in leaves if leaf is out and isinstance(leaf, torch.Tensor)), None
            )
        if tensors:
            alike = isinstance(out, (tuple, list)) and len(out) == len(example)
            return (
                self.call
                if alike and all(o is e for o, e in zip(out, example, strict=True))
                else None
            )
        device = self.call[2].get("device")
        # a default that a torch function mode would have set
        if device is not None and device != example.device:
            return None
        if out is example or (
            isinstance(example, Sym) and isinstance(out, Sym) and out.node is example.node
        ):
            return self.call
        # torch.zeros and its like put what the operator made into a shell of their own.
        made = not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and isinstance(
            out, torch.Tensor
        )
        return self.call if made and storages_of(out) == storages_of(example) else None

    def write(self, n: fx.Node, steps: list[Step], leaves):
        """Write operators for a call, and give it Dynamo's result. None when an argument is unknown
        in the view.
        """

        def given(a):
            return (
                a
                if isinstance(a, Made)
                else self.node_of(leaves[a.i] if isinstance(a, Given) else a)
            )

        try:
            arguments = [fx.node.map_aggregate((step.args, step.kwargs), given) for step in steps]
        except LookupError:
            return None
        made: list[fx.Node] = []
        for step, (args, kwargs) in zip(steps, arguments, strict=True):
            if made:
                args, kwargs = fx.node.map_aggregate(
                    (args, kwargs), lambda a: made[a.i] if isinstance(a, Made) else a
                )
            name = (
                step.target.overloadpacket.__name__ if isinstance(step.target, OpOverload) else None
            )
            node = self.tracer.graph.create_node("call_function", step.target, args, kwargs, name)
            node.meta |= {key: item for key, item in n.meta.items() if key != "example_value"}
            node.meta["val"] = step.value
            made.append(node)
        example = n.meta["example_value"]
        if isinstance(example, Sym):
            return track_tensor_tree(
                example, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer
            )
        if isinstance(example, torch.Tensor):
            node.meta["val"] = example  # of a recipe: the first call's was another
        several = isinstance(example, (tuple, list))
        for value, holder in zip(
            example if several else (example,), made[1:] if several else made[-1:], strict=True
        ):
            self.untracked[id(value)] = fx.Proxy(holder, self.tracer)
        return example

    def node_of(self, a):
        """What stands for an operator's argument in the view. LookupError: nothing does."""
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
        known = self.untracked.get(id(value))
        return self.tracer.unwrap_proxy(value) if known is None else known

    def track(self, values) -> None:
        """Tell the tracer of values that it has not heard of."""
        for value in pytree.tree_leaves(values):
            proxy = self.untracked.pop(id(value), None)
            if proxy is not None:
                track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)


def may_be_one(n: fx.Node, args: tuple) -> bool:
    """Calls of torch choose their operators by their arguments alone, but for indexing, which looks
    at what its first operator gave to see whether the next is needed. Functions of the user may
    look at anything.
    """
    if n.op == "call_method":
        return isinstance(args[0], torch.Tensor)
    if n.target is operator.getitem:
        return isinstance(args[0], torch.Tensor) and indices(args[0], args[1]) == 1
    return (
        not isinstance(n.target, types.FunctionType)
        or n.target.__module__.partition(".")[0] == "torch"
    )


def indices(x: torch.Tensor, index) -> int:
    """How many operators an index can be at most: all its tensors are one; `:` is none where sizes
    are numbers.
    """
    index = index if isinstance(index, tuple) else (index,)
    fixed = all(type(size) is int for size in x.shape)
    tensors = any(isinstance(i, torch.Tensor) for i in index)
    views = [
        i
        for i in index
        if i is not Ellipsis and not isinstance(i, torch.Tensor) and not (fixed and whole(i))
    ]
    # a bool is an unsqueeze and an index
    return tensors + len(views) + sum(isinstance(i, bool) for i in views)


def whole(i) -> bool:
    return isinstance(i, slice) and i.start is None and i.stop is None and i.step is None
