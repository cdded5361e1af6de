"""New memory that is written part by part, made functional in the view.

`out = torch.empty_like(x); out[..., 0::2] = a; out[..., 1::2] = b` becomes
`stack((a, b), -1).flatten(-2)`, and with `out[..., :n]` and `out[..., n:]` it becomes `cat((a, b),
-1)`. That is so if (a) the parts are slices of one dimension that have every element once; (b) the
memory was made in this view, without a gradient, in the same grad and autocast region as all the
writes, and nothing else writes to it, or to what is written before it is; (c) nothing but the
writes reads it before the last of them; (d) a part is written a tensor of its own shape, so that at
most a cast is left; and (e) the result lies in memory as that memory does.
"""

from __future__ import annotations

from torch import fx

from fusion_backend.capture.aliases import may_alias, storages, written_by
from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, is_mutation, value_of
from fusion_backend.compat.torch import aten

END = 2**63 - 1  # of a slice without one


def functionalize_fills(view: View) -> dict[fx.Node, list[fx.Node]]:
    """Convert the memory that may be converted. Returns its value -> the chain: the node that made
    the memory, what is written to each part, and the value.
    """
    written: dict[fx.Node, list[fx.Node]] = {}
    for n in view.graph.find_nodes(op="call_function", target=aten.copy_.default):
        part = n.args[0]
        if part.target is aten.slice.Tensor and isinstance(part.args[0], fx.Node):
            written.setdefault(part.args[0], []).append(n)
    order = {n: i for i, n in enumerate(view.graph.nodes)} if written else {}
    chains = {}
    for memory, copies in written.items():
        if (along := parts_of(memory, copies)) and is_filled(view, memory, copies, order):
            chain = filled(view, memory, copies, *along)
            if chain is not None:
                chains[chain[-1]] = chain
                readers = order[copies[-1]]
                memory.replace_all_uses_with(
                    chain[-1], delete_user_cb=lambda u, last=readers: order.get(u, -1) > last
                )
                for n in copies:
                    part = n.args[0]
                    view.graph.erase_node(n)
                    view.graph.erase_node(part)
    return chains


def parts_of(memory: fx.Node, copies: list[fx.Node]) -> tuple[int, list[int], bool] | None:
    """The dimension, the order in which the parts stand in it, and whether they stand by turns;
    None where they are not every element once.
    """
    slices, value = [n.args[0] for n in copies], value_of(memory)
    if len(copies) < 2 or any(s.kwargs for s in slices):
        return None
    given = [(*s.args[1:], *(0, None, None, 1)[len(s.args) - 1 :]) for s in slices]
    dims = {s[0] % value.dim() for s in given}
    if len(dims) > 1:
        return None
    (dim,) = dims
    size = value.shape[dim]
    bounds = [(s[1] or 0, size if s[2] in (None, END) else s[2], s[3]) for s in given]
    if not all(isinstance(v, int) and v >= 0 for b in bounds for v in b):
        return None
    places = sorted(range(len(copies)), key=lambda i: bounds[i][0])
    starts, stops, steps = zip(*(bounds[i] for i in places), strict=True)
    count = len(copies)
    if starts == tuple(range(count)) and {*stops} == {size} and {*steps} == {count}:
        return (dim, places, True) if size % count == 0 else None
    one_by_one = starts[0] == 0 and stops == (*starts[1:], size) and {*steps} == {1}
    return (dim, places, False) if one_by_one else None


def is_filled(view: View, memory: fx.Node, copies: list[fx.Node], order: dict) -> bool:
    """Is it new memory that only these writes touch until they are done, each a whole part?"""
    if not is_lowered(memory) or is_mutation(memory) or may_alias(memory):
        return False
    if memory in view.requires_grad:  # what is written over has a gradient of zeros
        return False
    region, alike = view.region.get(memory), storages(memory)
    parts, last = {n.args[0] for n in copies}, copies[-1]
    if any(u not in parts and order[u] < order[last] for u in memory.users):
        return False
    for n in copies:
        part, given = n.args[:2]
        if n.users or len(part.users) > 1 or view.region.get(n) != region:
            return False
        if not isinstance(given, fx.Node) or not same(value_of(given).shape, value_of(part).shape):
            return False
        alike |= storages(given)
    writers = (n for n in order if n not in copies and order[n] < order[last])
    if any(written_by(n, view, {}) & alike for n in writers if order[n] > order[memory]):
        return False
    return not any(is_mutation(n) and n > last and storages(n) & storages(memory) for n in order)


def filled(
    view: View, memory: fx.Node, copies: list[fx.Node], dim: int, places: list[int], turns: bool
) -> list[fx.Node] | None:
    """The chain, in the graph; None where the value would lie otherwise in memory."""
    dtype = value_of(memory).dtype
    values = [value_of(n.args[1]).to(dtype) for n in copies]
    in_order = [values[i] for i in places]
    stacked = aten.stack.default(in_order, dim + 1) if turns else None
    result = aten.cat.default(in_order, dim) if stacked is None else stacked.flatten(dim, dim + 1)
    layout = (*result.shape, *result.stride())
    if not same(layout, (*value_of(memory).shape, *value_of(memory).stride())):
        return None
    chain = [memory]
    for n, value in zip(copies, values, strict=True):
        chain.append(made(view, n, n, aten.to.dtype, (n.args[1], dtype), value))
    parts, last = [chain[1 + i] for i in places], copies[-1]
    if stacked is None:
        return [*chain, made(view, last, memory, aten.cat.default, (parts, dim), result)]
    both = made(view, last, last, aten.stack.default, (parts, dim + 1), stacked)
    flat = made(view, last, memory, aten.flatten.using_ints, (both, dim, dim + 1), result)
    return [*chain, flat]


def made(view: View, n: fx.Node, like: fx.Node, target, args: tuple, value) -> fx.Node:
    """A node in front of `n`, of the same owner and region. It has the value of `like` where that
    is the whole memory: later names of the memory are names of it.
    """
    with view.graph.inserting_before(n):
        new = view.graph.call_function(target, args)
    new.meta = n.meta | {"val": value if like is n else value_of(like)}
    for known in (view.owner, view.region):
        if n in known:
            known[new] = known[n]
    if view.requires_grad.intersection(new.all_input_nodes):
        view.requires_grad.add(new)
    return new
