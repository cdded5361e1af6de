"""Caches the operators that a call was traced into, for equal calls: models repeat their layers,
and a repeated call need not be run.

The key is everything that the operators can depend on: the callee, constants, dtype, device, sizes,
strides, requires_grad and lazy conjugation of the tensors, which arguments are the same value, grad
mode and autocast.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fusion_backend.compat.torch import OpOverload, pytree, schema_of, sym_key

Sym = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True)
class Argument:
    """The i-th flat argument of the call."""

    i: int


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of the i-th step."""

    i: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator of a call; it takes Arguments, Results, symbolic numbers and constants."""

    target: object
    args: tuple
    kwargs: dict
    value: object


class CallCache:
    """The steps of each call that was run, by the call's key. The last step gives the result."""

    def __init__(self):
        self.steps: dict[tuple, list[Step]] = {}

    def key(self, n: fx.Node, leaves: list):
        """The key of a call with these flat arguments; None where `key_of` has none for them."""
        spec = pytree.tree_structure((n.args, n.kwargs))
        parts: list = [n.op, n.target, str(spec), torch.is_grad_enabled()]
        parts += [
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
        ]
        seen = key_of(leaves)
        return None if seen is None else (*parts, seen)

    def remember(
        self, key, traced: list[fx.Node], result: fx.Node, arguments: dict[fx.Node, Argument]
    ) -> None:
        """Remember the nodes that a call was traced into. `arguments` has the nodes of the view
        that its arguments stand for. Nothing is remembered where the nodes read other values than
        these, write to memory or draw random numbers.
        """
        # sizes are computed again for each call
        steps = [m for m in traced if not isinstance(m.meta.get("val"), Sym)]
        if not steps or steps[-1] is not result or not all(map(repeatable, steps)):
            return
        sources = {m: Result(i) for i, m in enumerate(steps)} | arguments

        def source(a: fx.Node):
            return sources[a] if a in sources else a.meta["val"]

        inputs = [a for m in steps for a in m.all_input_nodes]
        if all(a in sources or isinstance(a.meta.get("val"), Sym) for a in inputs):
            self.steps[key] = [
                Step(m.target, *fx.node.map_arg((m.args, m.kwargs), source), m.meta["val"])
                for m in steps
            ]


def key_of(leaves: list) -> tuple | None:
    """Everything that operators can see of their flat arguments. None if there is no such key: for
    a sparse tensor, or a value without a hash.
    """
    parts: list = []
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided:
                return None
            sizes = tuple(map(sym_key, (*leaf.shape, *leaf.stride())))
            flags = leaf.requires_grad, leaf.is_conj(), leaf.is_neg()
            parts.append(
                (leaf.dtype, leaf.device, leaf.dim(), sizes, flags, first.setdefault(id(leaf), i))
            )
        elif isinstance(leaf, slice):
            parts.append(("slice", sym_key(leaf.start), sym_key(leaf.stop), sym_key(leaf.step)))
        else:
            # 0.0 is not -0.0
            parts.append((type(leaf), repr(leaf) if type(leaf) is float else sym_key(leaf)))
    try:
        hash(tuple(parts))
    except TypeError:
        return None
    return tuple(parts)


def repeatable(m: fx.Node) -> bool:
    """Does the node do the same every time: no write to memory, no random numbers?"""
    if not isinstance(m.target, OpOverload):
        return m.target is operator.getitem
    return (
        not schema_of(m.target).is_mutable
        and torch.Tag.nondeterministic_seeded not in m.target.tags
    )
