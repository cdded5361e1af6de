"""In-place code on fresh locals, made functional in the view, so that patterns see through it.

`r = x @ w1 + b1; r.sigmoid_(); r *= x @ w2 + b2` becomes the product it computes. An in-place node is converted
when (a) it mutates its first argument only and has a functional overload that gives the same dtype, shape and
strides; (b) the storage was created in this view, by an operator that is not a view, in the same grad and autocast
region; (c) every other value in that storage is part of the chain or is made after the last mutation.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture import View, is_lowered
from fusion_backend.torch_api import OpOverload, pytree

# No functional form with a gradient above autograd (copy_), or not arithmetic at all.
NEVER = {"copy_", "set_", "resize_", "detach_", "requires_grad_"}


def storages(node: fx.Node) -> set[int]:
    """Identities of the storages that the node's values live in."""
    return {
        v.untyped_storage()._cdata
        for v in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor) and v.layout == torch.strided
    }


def is_mutation(node: fx.Node) -> bool:
    return is_lowered(node) and node.target._schema.is_mutable


def may_alias(node: fx.Node) -> bool:
    """Does the schema let a result share memory with an argument it does not write?"""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in node.target._schema.arguments)


def functional_overload(op: OpOverload) -> OpOverload | None:
    """The operator that computes what `op` writes into its first argument."""
    name = op._schema.name.split("::")[1]
    arguments = op._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if not name.endswith("_") or name.endswith("__") or name in NEVER:
        return None
    if len(written) != 1 or written[0].name != arguments[0].name:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    found = getattr(packet, op._overloadname, None)
    if found is None or any(a.alias_info for a in found._schema.arguments):
        return None
    return found if [a.name for a in found._schema.arguments] == [a.name for a in arguments] else None


def value_of(arg):
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def functionalize_locals(view: View) -> dict[fx.Node, list[fx.Node]]:
    """Convert what may be converted. Returns converted node -> earlier members of its chain, in order."""
    if not any(is_mutation(n) for n in view.graph.nodes):
        return {}
    order = {n: i for i, n in enumerate(view.graph.nodes)}
    by_storage: dict[int, list[fx.Node]] = {}
    for n in order:
        for s in storages(n):
            by_storage.setdefault(s, []).append(n)
    last_mutation = {s: max((order[n] for n in group if is_mutation(n)), default=-1) for s, group in by_storage.items()}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for n in list(order):
        if not is_mutation(n) or not isinstance(n.args[0], fx.Node):
            continue
        target = functional_overload(n.target)
        held = storages(n.args[0])
        if target is None or len(held) != 1:
            continue
        (storage,) = held
        group = by_storage[storage]
        if convertible(view, n, target, group, order, last_mutation[storage], chains):
            n.target = target
            chains[n] = [o for o in group if order[o] < order[n]]
            for older in chains[n]:  # every later reader of an older name reads the new value
                older.replace_all_uses_with(n, delete_user_cb=lambda u, n=n: order[u] > order[n])
    return chains


def convertible(view, n, target, group, order, last_mutation, chains) -> bool:
    root = group[0]
    if not is_lowered(root) or may_alias(root) or (is_mutation(root) and root not in chains):
        return False
    if view.region.get(root) != view.region.get(n):
        return False
    for other in group:
        part = other is root or other in chains or (is_mutation(other) and functional_overload(other.target))
        if not part and order[other] < last_mutation:
            return False
    had = value_of(n.args[0])
    args, kwargs = pytree.tree_map(value_of, (n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node))
    try:
        gets = target(*args, **kwargs)
    except Exception:  # an operator that refuses on fakes stays as the user wrote it
        return False
    return (gets.dtype, gets.shape, gets.stride()) == (had.dtype, had.shape, had.stride())
