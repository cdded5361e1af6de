"""Made-up inputs of a region: of the real sizes, strides and dtypes, with indices in their range
and masks as the graph computes them.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import hinted, overlaps_itself, pytree
from fusion_backend.decide.neighbours import elementwise
from fusion_backend.measure.cut import NUMBERS, Cut, number
from fusion_backend.measure.region import INDEXING, MOVING

LONGEST = 64  # operators that compute a mask from what is no float
# Besides elementwise operators and views: what masks are computed with.
MASKS = {
    f"aten::{name}"
    for name in """
    arange ones zeros full empty scalar_tensor ones_like zeros_like full_like tril triu cumsum diff
    all any eye lift_fresh_copy
    """.split()
}


def made_up(cut: Cut, device: torch.device) -> list[torch.Tensor]:
    """A tensor for each input of the cut, and `requires_grad` where its gradient is wanted."""
    return [tensor(a, cut, device).requires_grad_(a in cut.grads) for a in cut.inputs]


def nbytes(value) -> int:
    """The memory that a fake tensor would take: expanded dimensions take none."""
    sizes, strides = hinted(value.shape), hinted(value.stride())
    return span(sizes, strides) * value.element_size()


def span(sizes, strides) -> int:
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def tensor(a: fx.Node, cut: Cut, device: torch.device) -> torch.Tensor:
    value = a.meta["val"]
    sizes, strides = hinted(value.shape), hinted(value.stride())
    memory = torch.empty(span(sizes, strides), dtype=value.dtype, device=device)
    laid_out = memory.as_strided(sizes, strides)
    if known := computed(a, device):
        content = known[0]
        if not overlaps_itself(laid_out):
            return laid_out.copy_(content)
        return content.expand(sizes)
    if value.dtype == torch.bool:
        memory.bernoulli_(0.9)
    elif value.is_floating_point() or value.is_complex():
        memory.normal_()
    else:
        memory.random_(0, limit(a, {*cut.region.nodes}))
    return laid_out


def limit(a: fx.Node, inside: set[fx.Node]) -> int:
    """One more than the largest index that everything in the region takes; 1 where nothing says
    so, since 0 is an index of anything.
    """
    bounds, pending, seen = [], [a], set()
    while pending:
        n = pending.pop()
        for u in n.users:
            if u not in inside or u in seen:
                continue
            seen.add(u)
            name = name_of(u)
            if name in INDEXING:
                bounds.append(indexed(u, n))
            elif is_lowered(u) and name in MOVING:
                pending.append(u)
    return max(1, min(bounds, default=1))


def indexed(n: fx.Node, index: fx.Node) -> int:
    """The size of the smallest dimension that an operator may read at this index."""
    table = n.args[0]
    sizes = hinted(table.meta["val"].shape)
    if name_of(n) == "aten::embedding":
        return sizes[0]
    if name_of(n).startswith(("aten::cross_entropy", "aten::nll")):
        return sizes[1 if len(sizes) > 1 else 0]
    return min(sizes)


def computed(a: fx.Node, device: torch.device) -> list[torch.Tensor]:
    """The value of a mask, or of ids, that the graph computes from no floats, with ones for what it
    is given; nothing where that is not so.
    """
    chain: dict[fx.Node, None] = {}
    pending = [a]
    while pending:
        n = pending.pop()
        if n in chain:
            continue
        chain[n] = None
        if len(chain) > LONGEST or not simple(n):
            return []
        pending += [m for m in n.all_input_nodes if m not in chain]
    if a.op != "call_function":
        return []
    values: dict[fx.Node, object] = {}
    order = {n: i for i, n in enumerate(a.graph.nodes) if n in chain}
    with torch.no_grad():
        for n in sorted(chain, key=order.__getitem__):
            values[n] = run(n, values, device)
    return [values[a]]


def simple(n: fx.Node) -> bool:
    value = n.meta.get("val")
    if isinstance(value, NUMBERS):
        return True
    if not isinstance(value, torch.Tensor) or hinted(value.shape) is None:
        return False
    if n.op == "placeholder":
        return not value.is_floating_point()
    return is_lowered(n) and (elementwise(n) or name_of(n) in MASKS)


def run(n: fx.Node, values: dict, device: torch.device):
    value = n.meta["val"]
    if isinstance(value, NUMBERS):
        return number(value)
    if n.op == "placeholder":
        return torch.ones(hinted(value.shape), dtype=value.dtype, device=device)
    args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map_only(NUMBERS, number, (args, kwargs))
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    return n.target(*args, **kwargs)
