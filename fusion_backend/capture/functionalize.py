"""In-place code on fresh locals, made functional in the view, so that patterns see through it.

`r = x @ w1 + b1; r.sigmoid_(); r *= x @ w2 + b2` becomes the product it computes. An in-place node
is converted when (a) it mutates its first argument only and has a functional overload that gives
the same shape and strides, and the same dtype or a wider one, which is then cast: bf16 += fp32
computes in fp32 and rounds; (b) the storage was created in this view, by an operator that is
not a view, possibly as one of several results, in the same grad and autocast region; (c) every
other value in that storage is part of the chain, aliases the whole of it, or is made after the last
mutation.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from fusion_backend.capture.aliases import aliases_whole, may_alias, returned, storages
from fusion_backend.capture.filled import functionalize_fills
from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, is_mutation, name_of, value_of
from fusion_backend.compat.torch import OpOverload, aten, overload_of, pytree, schema_of

# These have no functional form with a gradient above autograd (copy_), or are not arithmetic.
NEVER = {"copy_", "set_", "resize_", "detach_", "requires_grad_"}
HALVES = {torch.bfloat16, torch.float16}


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


def functionalize_locals(view: View) -> dict[fx.Node, list[fx.Node]]:
    """Convert the in-place nodes that may be converted, and what filled.py converts. Returns
    converted node -> its chain: the nodes with a value in its storage, in order.
    """
    if not any(is_mutation(n) for n in view.graph.nodes):
        return {}
    chains = functionalize_fills(view)
    order = {n: i for i, n in enumerate(view.graph.nodes)}
    groups = mutated_groups(view, order)
    for n in list(order):
        if not is_mutation(n) or not isinstance(n.args[0], fx.Node):
            continue
        target = functional_overload(n.target)
        memory = storages(n.args[0])
        if target is None or len(memory) != 1:
            continue
        group = groups[memory.pop()]
        result = None
        if group.only_whole:
            result = functional_result(view, n, target, group.maker, chains)
        if result is not None:
            if torch.Tag.nondeterministic_seeded in n.target.tags:
                # rewrite/writer.py restores the in-place operator: the functional one draws other
                # numbers
                n.meta["in_place"] = n.target
            if result.dtype == value_of(n).dtype:
                n.target = target
            else:
                order[rounded(view, n, target, result)] = order[n]
            chains[n] = group.nodes
            for older in group.upto(n):  # every later reader of an older name reads the new value
                older.replace_all_uses_with(n, delete_user_cb=lambda u, n=n: order[u] > order[n])
    return chains


def mutated_groups(view: View, nodes) -> dict[int, StorageGroup]:
    """The storages that in-place operators write to, each with its nodes in order."""
    trained = any(map(view.trains, nodes))
    by_storage: dict[int, list[fx.Node]] = {}
    for n in nodes:
        for s in storages(n):
            by_storage.setdefault(s, []).append(n)
    return {
        s: StorageGroup(group, trained, view)
        for s, group in by_storage.items()
        if any(map(is_mutation, group))
    }


class StorageGroup:
    """The nodes whose values live in one storage, and the node that made it: the first of them, or
    an operator of several results, of which the first takes one. `only_whole`: until the last
    write, every value covers the whole storage, and has its gradient.
    """

    def __init__(self, nodes: list[fx.Node], trained: bool, view: View):
        self.maker = nodes[0]
        several = isinstance(nodes[0].meta.get("val"), tuple | list) and not is_mutation(nodes[0])
        self.nodes = nodes = nodes[several:]
        last = max(i for i, n in enumerate(nodes) if is_mutation(n))
        self.only_whole = all(
            part_of_chain(n, nodes[0], trained) and not returned_by_body(n, nodes[last], view)
            for n in nodes[:last]
        )
        self.position = {n: i for i, n in enumerate(nodes)}
        self.start = 0

    def upto(self, n: fx.Node) -> list[fx.Node]:
        """The nodes before n whose later readers do not yet read a newer value."""
        start, self.start = self.start, self.position[n]
        return self.nodes[start : self.start]


def part_of_chain(n: fx.Node, root: fx.Node, trained: bool) -> bool:
    """Is it the first value, a write with a functional form, or the whole under another name, which
    has the gradient of the value? In y.detach().add_(d), y keeps its gradient, and d gets none.
    """
    if n is root or (is_mutation(n) and functional_overload(n.target)):
        return True
    if trained and name_of(n) == "aten::detach":
        return False
    return is_lowered(n) and not is_mutation(n) and aliases_whole(n, root)


def returned_by_body(n: fx.Node, last: fx.Node, view: View) -> bool:
    """May a checkpoint or its like that reads `n` before `last` have returned it, as x.float() in
    its body does?
    """
    return any(u < last and n in returned(u, view) for u in n.users)


def functional_result(
    view: View, n: fx.Node, target: OpOverload, maker: fx.Node, chains
) -> torch.Tensor | None:
    """What the functional operator returns, if the storage was made here, in the region of `n`, and
    this is the value that the in-place one writes, but for a rounding; else None.
    """
    if not is_lowered(maker) or may_alias(maker) or (is_mutation(maker) and maker not in chains):
        return None
    if view.region.get(maker) != view.region.get(n):
        return None
    before = value_of(n.args[0])
    args, kwargs = pytree.tree_map(
        value_of, (n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node)
    )
    try:
        after = target(*args, **kwargs)
    except Exception:  # an operator that refuses on fakes stays as the user wrote it
        return None
    rounds = before.dtype in HALVES and after.dtype == torch.float32
    if after.dtype != before.dtype and not rounds:
        return None
    alike = same((*after.shape, *after.stride()), (*before.shape, *before.stride()))
    return after if alike else None


def rounded(view: View, n: fx.Node, target: OpOverload, result: torch.Tensor) -> fx.Node:
    """Make an in-place node the rounding of a functional one, which is inserted and returned."""
    with view.graph.inserting_before(n):
        wide = view.graph.call_function(target, n.args, n.kwargs)
    wide.meta = n.meta | {"val": result}
    for known in (view.owner, view.region):
        if n in known:
            known[wide] = known[n]
    if n in view.requires_grad:
        view.requires_grad.add(wide)
    n.target, n.args, n.kwargs = aten.to.dtype, (wide, value_of(n).dtype), {}
    return wide
