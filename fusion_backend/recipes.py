"""What a torch call lowers to, remembered: models repeat their layers, and running a call on fakes is slow.

A recipe is kept for calls that became exactly one functional ATen operator, or none. Its key is everything that the
lowering can depend on: the callee, constants, dtype, device, sizes, strides and requires_grad of the tensors, which
arguments are the same value, grad mode and autocast.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.torch_api import OpOverload, pytree, sym_key

Sym = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Recipes:
    """key -> (operator, arguments with inputs by position); the position of the argument that is returned as it is;
    or None where neither holds."""

    def __init__(self):
        self.known: dict[tuple, tuple | None] = {}

    def find(self, n: fx.Node, leaves: list, tracer, proxy_of):
        """The lowered call as a proxy, or the Position of the argument it returns; the key to learn under when it is
        new; None when it cannot be a recipe."""
        example = n.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or n.op == "get_attr":
            return None
        key = self.key(n, leaves)
        if key is None or self.known.get(key, key) is None:
            return None
        if key not in self.known:
            return key
        if isinstance(self.known[key], Position):
            return self.known[key]
        target, args, kwargs = self.known[key]

        def given(a):
            return proxy_of(leaves[a.position]) if isinstance(a, Position) else a

        args, kwargs = pytree.tree_map(given, (args, kwargs), is_leaf=lambda a: isinstance(a, Position))
        return tracer.create_proxy("call_function", target, args, kwargs)

    def key(self, n: fx.Node, leaves: list):
        spec = pytree.tree_structure((n.args, n.kwargs))
        parts: list = [n.op, n.target, str(spec), torch.is_grad_enabled()]
        parts += [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        first: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.layout != torch.strided:
                    return None
                sizes = tuple(map(sym_key, (*leaf.shape, *leaf.stride())))
                same = first.setdefault(id(leaf), i)
                parts.append((leaf.dtype, leaf.device, leaf.dim(), sizes, leaf.requires_grad, same))
            elif isinstance(leaf, slice):
                parts.append(("slice", sym_key(leaf.start), sym_key(leaf.stop), sym_key(leaf.step)))
            else:
                parts.append((type(leaf), sym_key(leaf)))
        try:
            hash(key := tuple(parts))
        except TypeError:
            return None
        return key

    def learn(self, key, new: list[fx.Node], out, leaves: list, tracer) -> None:
        made = [m for m in new if not isinstance(m.meta.get("val"), Sym)]  # size arithmetic comes and goes
        returned = [i for i, leaf in enumerate(leaves) if leaf is out]
        self.known[key] = Position(returned[0]) if returned and not made else None
        if len(made) != 1 or not isinstance(out, torch.Tensor) or not isinstance(made[0].target, OpOverload):
            return
        (node,) = made
        proxy = tracer.unwrap_proxy(out)
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if not isinstance(proxy, fx.Proxy) or proxy.node is not node or node.target._schema.is_mutable or random:
            return
        positions: dict[fx.Node, Position] = {}
        for i, leaf in enumerate(leaves):
            held = tracer.unwrap_proxy(leaf) if isinstance(leaf, (torch.Tensor, *Sym)) else None
            if isinstance(held, fx.Proxy):
                positions.setdefault(held.node, Position(i))
        if all(a in positions for a in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), positions.__getitem__)
            self.known[key] = (node.target, args, kwargs)


class Position:
    """The i-th flat argument of the call."""

    def __init__(self, position: int):
        self.position = position
