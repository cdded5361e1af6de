"""In-place code on fresh locals, made functional in the view, so that patterns see through it.

`r = x @ w1 + b1; r.sigmoid_(); r *= x @ w2 + b2` becomes the product it computes. An in-place node
is converted when (a) it mutates its first argument only and has a functional overload that gives
the same dtype, shape and strides; (b) the storage was created in this view, by an operator that is
not a view, in the same grad and autocast region; (c) every other value in that storage is part of
the chain, another name for the whole of it, or is made after the last mutation.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.tracer import View, is_lowered
from fusion_backend.compat.torch import OpOverload, overload_of, pytree, schema_of, storage_id

# No functional form with a gradient above autograd (copy_), or not arithmetic at all.
NEVER = {"copy_", "set_", "resize_", "detach_", "requires_grad_"}


def storages(node: fx.Node) -> set[int]:
    """Identities of the storages that the node's values live in."""
    return {
        storage_id(v)
        for v in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor) and v.layout == torch.strided
    }


def is_mutation(node: fx.Node) -> bool:
    return is_lowered(node) and schema_of(node.target).is_mutable


def may_alias(node: fx.Node) -> bool:
    """Does the schema let a result share memory with an argument it does not write?"""
    return any(
        a.alias_info is not None and not a.alias_info.is_write
        for a in schema_of(node.target).arguments
    )


@functools.lru_cache(4096)
def functional_overload(op: OpOverload) -> OpOverload | None:
    """The operator that computes what `op` writes into its first argument."""
    name = schema_of(op).name.split("::")[1]
    arguments = schema_of(op).arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if not name.endswith("_") or name.endswith("__") or name in NEVER:
        return None
    if len(written) != 1 or written[0].name != arguments[0].name:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    found = getattr(packet, overload_of(op), None)
    if found is None or any(a.alias_info for a in schema_of(found).arguments):
        return None
    return (
        found
        if [a.name for a in schema_of(found).arguments[1:]] == [a.name for a in arguments[1:]]
        else None
    )


def value_of(arg):
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def functionalize_locals(view: View) -> dict[fx.Node, list[fx.Node]]:
    """Convert what may be converted. Returns converted node -> its chain: the nodes of its storage,
    in order.
    """
    if not any(is_mutation(n) for n in view.graph.nodes):
        return {}
    order = {n: i for i, n in enumerate(view.graph.nodes)}
    by_storage: dict[int, list[fx.Node]] = {}
    for n in order:
        for s in storages(n):
            by_storage.setdefault(s, []).append(n)
    groups = {s: Group(nodes) for s, nodes in by_storage.items() if any(map(is_mutation, nodes))}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for n in list(order):
        if not is_mutation(n) or not isinstance(n.args[0], fx.Node):
            continue
        target = functional_overload(n.target)
        held = storages(n.args[0])
        if target is None or len(held) != 1:
            continue
        group = groups[held.pop()]
        if group.closed and convertible(view, n, target, group.nodes[0], chains):
            if torch.Tag.nondeterministic_seeded in n.target.tags:
                # rewrite.py goes back to it: the other operator draws other numbers
                n.meta["in_place"] = n.target
            n.target = target
            chains[n] = group.nodes
            for older in group.upto(n):  # every later reader of an older name reads the new value
                older.replace_all_uses_with(n, delete_user_cb=lambda u, n=n: order[u] > order[n])
    return chains


class Group:
    """The nodes whose values live in one storage."""

    def __init__(self, nodes: list[fx.Node]):
        self.nodes = nodes
        last = max(i for i, n in enumerate(nodes) if is_mutation(n))
        # Until the last write every value is the whole of it.
        self.closed = all(part_of_chain(n, nodes[0]) for n in nodes[:last])
        self.position = {n: i for i, n in enumerate(nodes)}
        self.start = 0

    def upto(self, n: fx.Node) -> list[fx.Node]:
        """The nodes before n whose later readers do not read a newer value already."""
        start, self.start = self.start, self.position[n]
        return self.nodes[start : self.start]


def part_of_chain(n: fx.Node, root: fx.Node) -> bool:
    if n is root or (is_mutation(n) and functional_overload(n.target)):
        return True
    return is_lowered(n) and not is_mutation(n) and all_of(n, root)


def all_of(n: fx.Node, root: fx.Node) -> bool:
    """Is it another name for the whole of `root`: x.view(x.shape), x[:]?"""
    a, b = n.meta.get("val"), root.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return geometry(a) == geometry(b) and same(places(a), places(b))


def geometry(t: torch.Tensor) -> tuple:
    """Without the sizes, which may be symbolic."""
    return t.dtype, t.dim(), t.is_conj(), t.is_neg()


def places(t: torch.Tensor) -> tuple:
    return *t.shape, *t.stride(), t.storage_offset()


def convertible(view: View, n: fx.Node, target: OpOverload, root: fx.Node, chains) -> bool:
    if not is_lowered(root) or may_alias(root) or (is_mutation(root) and root not in chains):
        return False
    if view.region.get(root) != view.region.get(n):
        return False
    had = value_of(n.args[0])
    args, kwargs = pytree.tree_map(
        value_of, (n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node)
    )
    try:
        gets = target(*args, **kwargs)
    except Exception:  # an operator that refuses on fakes stays as the user wrote it
        return False
    return gets.dtype == had.dtype and same(
        (*gets.shape, *gets.stride()), (*had.shape, *had.stride())
    )
