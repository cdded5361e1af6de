"""What a call of several operators became, remembered for the next call like it: models repeat
their layers.

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
class Given:
    """The i-th flat argument of the call."""

    i: int


@dataclasses.dataclass(frozen=True)
class Made:
    """What the i-th step gave."""

    i: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator of a recipe; its arguments are Given, Made, symbolic numbers and constants."""

    target: object
    args: tuple
    kwargs: dict
    value: object


class Recipes:
    """key -> steps, of which the last gives the result."""

    def __init__(self):
        self.known: dict[tuple, list[Step]] = {}

    def key(self, n: fx.Node, leaves: list):
        spec = pytree.tree_structure((n.args, n.kwargs))
        parts: list = [n.op, n.target, str(spec), torch.is_grad_enabled()]
        parts += [
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
        ]
        seen = key_of(leaves)
        return None if seen is None else (*parts, seen)

    def learn(self, key, new: list[fx.Node], result: fx.Node, given: dict[fx.Node, Given]) -> None:
        """Keep what a call became; `given` says which nodes of the view held its arguments."""
        # size arithmetic comes and goes
        made = [m for m in new if not isinstance(m.meta.get("val"), Sym)]
        if not made or made[-1] is not result or not all(map(repeatable, made)):
            return
        places = {m: Made(i) for i, m in enumerate(made)} | given

        def place(a: fx.Node):
            return places[a] if a in places else a.meta["val"]

        if all(
            a in places or isinstance(a.meta.get("val"), Sym)
            for m in made
            for a in m.all_input_nodes
        ):
            arguments = [fx.node.map_arg((m.args, m.kwargs), place) for m in made]
            self.known[key] = [
                Step(m.target, *given, m.meta["val"])
                for m, given in zip(made, arguments, strict=True)
            ]


def key_of(leaves: list) -> tuple | None:
    """All that operators can see of their flat arguments; None where that cannot be told."""
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
    if not isinstance(m.target, OpOverload):
        return m.target is operator.getitem
    return (
        not schema_of(m.target).is_mutable
        and torch.Tag.nondeterministic_seeded not in m.target.tags
    )
