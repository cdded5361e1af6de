"""New memory that is written part by part, made functional in the view.

`out = torch.empty_like(x); out[..., 0::2] = a; out[..., 1::2] = b` becomes
`stack((a, b), -1).flatten(-2)`, and with `out[..., :n]` and `out[..., n:]` it becomes `cat((a, b),
-1)`. That is so if (a) the parts are slices of one dimension that together cover every element
once; (b) the memory was made in this view, without a gradient, in the same grad and autocast region
as all the writes; (c) until the last of them nothing else reads or writes to it, and from the first
to the last nothing writes to any other memory, except to parts like these; (d) a part is written a
tensor of its own shape and device, so that at most a cast is left; and (e) the result lies in
memory as that memory does.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.aliases import may_alias, storages, written_by
from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, is_mutation, value_of
from fusion_backend.compat.torch import FakeTensor, aten

END = 2**63 - 1  # of a slice without one
HALVES = {torch.bfloat16, torch.float16}


def functionalize_fills(view: View) -> dict[fx.Node, list[fx.Node]]:
    """Convert the memory that may be converted. Returns its value -> the chain: the node that made
    the memory, what is written to each part, and the value.
    """
    written: dict[fx.Node, list[fx.Node]] = {}
    for n in view.graph.find_nodes(op="call_function", target=aten.copy_.default):
        part = n.args[0]
        if part.target is aten.slice.Tensor and isinstance(part.args[0], fx.Node):
            written.setdefault(part.args[0], []).append(n)
    if not written:
        return {}
    makers: dict[int, fx.Node] = {}
    writers: dict[fx.Node, set[int]] = {}
    for n in view.graph.nodes:
        for storage in storages(n):
            makers.setdefault(storage, n)
        if found := written_by(n, view, {}):
            writers[n] = found
    fills = {n for copies in written.values() for n in copies}
    chains = {}
    for memory, copies in written.items():
        if any(makers[storage] is not memory for storage in storages(memory)):
            continue
        if (along := parts_of(memory, copies)) and is_filled(view, memory, copies, writers, fills):
            chain = filled(view, memory, copies, *along)
            if chain is not None:
                chains[chain[-1]] = chain
                last = copies[-1]
                memory.replace_all_uses_with(
                    chain[-1], delete_user_cb=lambda u, last=last: u > last
                )
                for n in copies:
                    part = n.args[0]
                    view.graph.erase_node(n)
                    view.graph.erase_node(part)
                    writers.pop(n)
    return chains


def parts_of(memory: fx.Node, copies: list[fx.Node]) -> tuple[int, list[int], bool] | None:
    """The dimension, the order in which the parts stand in it, and whether they alternate; None
    where they do not cover every element once.
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
    numbers = [v for s in given for v in s[1:] if v is not None]
    if not all(isinstance(v, int) and v >= 0 for v in (size, *numbers)):
        return None
    bounds = [
        (start or 0, size if stop in (None, END) else stop, step) for _, start, stop, step in given
    ]
    places = sorted(range(len(copies)), key=lambda i: bounds[i][0])
    starts, stops, steps = zip(*(bounds[i] for i in places), strict=True)
    count = len(copies)
    if starts == tuple(range(count)) and {*stops} == {size} and {*steps} == {count}:
        return (dim, places, True) if size % count == 0 else None
    one_by_one = starts[0] == 0 and stops == (*starts[1:], size) and {*steps} == {1}
    return (dim, places, False) if one_by_one else None


def is_filled(
    view: View, memory: fx.Node, copies: list[fx.Node], writers: dict, fills: set[fx.Node]
) -> bool:
    """Is it new memory that only these writes touch until they are done, each a whole part?
    `writers` has the storages that each node of the view may write to, and `fills` the nodes that
    write to parts of some memory.
    """
    if not is_lowered(memory) or is_mutation(memory) or may_alias(memory):
        return False
    if memory in view.requires_grad:  # what is written over has a gradient of zeros
        return False
    region, held = view.region.get(memory), storages(memory)
    parts, first, last = {n.args[0] for n in copies}, copies[0], copies[-1]
    if any(u not in parts and u < last for u in memory.users):
        return False
    for n in copies:
        part, given = n.args[:2]
        if n.users or len(part.users) > 1 or view.region.get(n) != region:
            return False
        if not isinstance(given, fx.Node) or not of_a_kind(value_of(given), value_of(part)):
            return False
        held |= storages(given)
    for n, found in writers.items():
        if n not in copies and n > first:
            # which memory a checkpoint returns is not known
            if n < last and (n not in fills or found & held):
                return False
            if found & storages(memory):
                return False
    return not refused_by_autocast(value_of(memory), region)


def of_a_kind(a, b) -> bool:
    """Are both ordinary tensors, on one device and of one shape?"""
    return type(a) is type(b) is FakeTensor and a.device == b.device and same(a.shape, b.shape)


def refused_by_autocast(value: torch.Tensor, region: tuple | None) -> bool:
    """Autocast fails where tensors of the other half precision are joined."""
    on = (
        [dtype for device, enabled, dtype in region[2] if enabled and device == value.device.type]
        if region
        else []
    )
    return bool(on) and value.dtype in HALVES.difference(on)


def filled(
    view: View, memory: fx.Node, copies: list[fx.Node], dim: int, places: list[int], turns: bool
) -> list[fx.Node] | None:
    """The chain, in the graph; None where the value would lie otherwise in memory."""
    whole = value_of(memory)
    dtypes = {value_of(n.args[1]).dtype for n in copies}
    # rounded at last, as what reads `stack(...).to(dtype)` has it
    dtype = dtypes.pop() if len(dtypes) == 1 else whole.dtype
    target, rest = (aten.stack.default, (dim + 1,)) if turns else (aten.cat.default, (dim,))
    try:
        values = [value_of(n.args[1]).to(dtype) for n in copies]
        joined = target([values[i] for i in places], *rest)
        flat = joined.flatten(dim, dim + 1) if turns else joined
    except Exception:  # an operator that refuses on fakes: the writes stay as the user wrote them
        return None
    if not same((*flat.shape, *flat.stride()), (*whole.shape, *whole.stride())):
        return None
    chain, last = [memory], copies[-1]
    for n, value in zip(copies, values, strict=True):
        chain.append(made(view, n, aten.to.dtype, (n.args[1], dtype), value))
    result = made(view, last, target, ([chain[1 + i] for i in places], *rest), joined)
    if turns:
        result = made(view, last, aten.flatten.using_ints, (result, dim, dim + 1), flat)
    # later names of the memory are names of its value
    return [*chain, made(view, last, aten.to.dtype, (result, whole.dtype), whole)]


def made(view: View, n: fx.Node, target, args: tuple, value: torch.Tensor) -> fx.Node:
    """A node in front of `n`, of the same owner and region."""
    with view.graph.inserting_before(n):
        new = view.graph.call_function(target, args)
    new.meta = n.meta | {"val": value}
    for known in (view.owner, view.region):
        if n in known:
            known[new] = known[n]
    with_grad = view.region.get(n, (True,))[0] and value.is_floating_point()
    if with_grad and view.requires_grad.intersection(new.all_input_nodes):
        view.requires_grad.add(new)
    return new
