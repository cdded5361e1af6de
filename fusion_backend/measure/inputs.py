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
    bound = limit(a, {*cut.region.nodes})
    if bound is not None:  # it is an index: whatever the graph computes, its range is what counts
        memory.random_(0, bound)
        return laid_out
    known = computed(a, device)
    if not known and (value.is_floating_point() or value.is_complex()):
        memory.normal_()
        return laid_out
    content = known[0] if known else masking(value, device)
    return content.expand(sizes) if overlaps_itself(laid_out) else laid_out.copy_(content)


def masking(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """1 and 0 in turns along the last dimension: whatever they mean in a mask, no row is left with
    nothing. It is not for an index, of which 1 may be out of range.
    """
    sizes = hinted(value.shape)
    last = sizes[-1] if sizes else 1
    return (1 - torch.arange(last, device=device) % 2).to(value.dtype).expand(sizes)


def limit(a: fx.Node, inside: set[fx.Node]) -> int | None:
    """One more than the largest index that everything in the region takes; None where nothing takes
    it for an index.
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
    return max(1, min(bounds)) if bounds else None


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
    """The value of a mask, or of ids, that the graph computes from no floats; nothing where that is
    not so.
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
        return masking(value, device)
    args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map_only(NUMBERS, number, (args, kwargs))
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    return n.target(*args, **kwargs)
