"""Made-up inputs of a region: of the real sizes, strides and dtypes, with indices in their range
and masks as the graph computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

import torch
from torch import fx

from fusion_backend.capture.sizes import span
from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import hinted, overlaps_itself, pytree, schema_of
from fusion_backend.decide.neighbours import elementwise
from fusion_backend.ir.expr import Expr
from fusion_backend.measure.cut import Cut, number
from fusion_backend.measure.indices import INDEXING, MOVING, is_index
from fusion_backend.measure.region import NUMBERS

SHAPED = {f"aten::{name}" for name in ("expand_as", "view_as", "reshape_as", "type_as")}
EMPTY: Mapping = MappingProxyType({})
DOCUMENTS = 8  # in a sequence
COMPARISONS = {f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
LONGEST = 256  # operators that compute a mask from what is no float
# Besides elementwise operators and views: what masks are computed with.
MASKS = {
    f"aten::{name}"
    for name in """
    arange ones zeros full empty scalar_tensor ones_like zeros_like full_like new_ones new_zeros
    new_full tril triu cumsum diff all any eye lift_fresh_copy __and__ __or__ __xor__ index where
    masked_fill repeat repeat_interleave tile cat stack roll flip floor_divide sum amin amax cummax
    cummin
    """.split()
}


def made_up(cut: Cut, device: torch.device) -> list[torch.Tensor]:
    """A tensor for each input of the cut, with `requires_grad` if its gradient is wanted; in
    inference as in the graph, for torch asks a weight whether it copies what it multiplies. The
    values are consistent: a value that masks are computed from is the same wherever it is read; an
    input that is computed from others, such as the sum of a bias and a mask, is computed from their
    values; and inputs that are equal in the graph are equal.
    """
    chains = {a: chain for a in cut.inputs if (chain := chain_of(a))}
    chains |= {n: [n] for chain in chains.values() for n in chain if n.op == "placeholder"}
    equal: dict[Expr | fx.Node, fx.Node] = {}  # value -> the first input that has it
    with torch.no_grad():
        found = {a: tensor(a, cut, device, chains.get(a, [])) for a in cut.inputs}
        for a in sorted(found):
            content = None
            if chain := chain_of(a, found.keys() - {a}):
                content = computed(chain, device, found)
            elif (same := equal.setdefault(cut.facts.canon.of.get(a, a), a)) is not a:
                content = found[same]
            if content is not None:
                found[a] = placed(content, a, cut, found[a].device)
    trained = cut.grads or {a for a in cut.inputs if a in cut.facts.view.requires_grad}
    return [found[a].detach().requires_grad_(a in trained) for a in cut.inputs]


def placed(content: torch.Tensor, a: fx.Node, cut: Cut, device: torch.device) -> torch.Tensor:
    """An input with content, laid out in memory as in the graph. An index is in its range: out of
    range it would stop the GPU for good.
    """
    if bounds := limits(a, {*cut.region.nodes}):
        content = content.clamp(0, max(0, min(bounds) - 1))
    laid_out = room(a.meta["val"], device)[1]
    return content.expand(laid_out.shape) if overlaps_itself(laid_out) else laid_out.copy_(content)


def tensor(a: fx.Node, cut: Cut, device: torch.device, chain: list[fx.Node]) -> torch.Tensor:
    value, bounds = a.meta["val"], limits(a, {*cut.region.nodes})
    device = place(value, device)
    if bounds and unknown(chain):  # an index, though it may be a mask, too
        memory, laid_out = room(value, device)
        memory.random_(0, max(1, min(bounds)))
        return laid_out
    if not chain and (value.is_floating_point() or value.is_complex()):
        memory, laid_out = room(value, device)
        memory.uniform_(0.5, 1.5) if variance(a, {*cut.region.nodes}) else memory.normal_()
        return laid_out
    return placed(computed(chain, device) if chain else masking(value, device), a, cut, device)


def room(value: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a value of the graph, and a tensor in it with the value's sizes and strides."""
    sizes, strides = hinted(value.shape), hinted(value.stride())
    memory = torch.empty(span(sizes, strides), dtype=value.dtype, device=device)
    return memory, memory.as_strided(sizes, strides)


def masking(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Ones and then zeros along the last dimension, as in padded batches: half are ones in the
    first row of the first dimension, and all but one in the last. Whether ones keep or hide, no row
    is fully masked.
    """
    sizes = hinted(value.shape)
    if not sizes:
        return torch.ones((), dtype=value.dtype, device=device)
    last, rows = sizes[-1], sizes[0] if len(sizes) > 1 else 1
    ones = torch.linspace(last / 2, max(last - 1, 1), rows, device=device).ceil()
    ones = ones.reshape(-1, *[1] * (len(sizes) - 1))
    return (torch.arange(last, device=device) < ones).to(value.dtype).expand(sizes)


def counts_documents(n: fx.Node) -> bool:
    """Does it count where documents begin, or end, by a cumulative sum of a comparison?"""
    counted = n.args[0] if name_of(n) == "aten::cumsum" else None
    return isinstance(counted, fx.Node) and name_of(counted) in COMPARISONS


def documents(value: torch.Tensor, dim: int, device: torch.device) -> torch.Tensor:
    """The numbers of eight documents along a dimension. Ones and zeros, of which they would be
    computed, might make each place a document, whose attention is quick and has no gradient.
    """
    sizes = hinted(value.shape)
    number = torch.arange(sizes[dim], device=device) * DOCUMENTS // sizes[dim]
    shape = [1] * len(sizes)
    shape[dim] = sizes[dim]
    return number.to(value.dtype).view(shape).expand(sizes).contiguous()


def place(value: torch.Tensor, device: torch.device) -> torch.device:
    """The device of a value of the graph: numbers that it multiplies by may be on the CPU."""
    return value.device if value.device.type == "cpu" else device


def limits(a: fx.Node, inside: set[fx.Node]) -> list[int]:
    """The bounds of an index, one for each tensor that it indexes in the region: one more than the
    largest valid index. 0 is always valid.
    """
    bounds, pending, seen = [], [a], set()
    while pending:
        n = pending.pop()
        for u in n.users:
            if u not in inside or u in seen:
                continue
            seen.add(u)
            name = name_of(u)
            if name in INDEXING and is_index(n):
                bounds.append(indexed(u, n))
            elif is_lowered(u) and name in MOVING:
                pending.append(u)
    return bounds


def variance(a: fx.Node, inside: set[fx.Node]) -> bool:
    """Is it one, as the running variance of a batch norm? The region takes its square root. Of a
    negative one all that follows is NaN, for which Inductor's erf takes another time.
    """
    pending, seen = [a], {a}
    while pending:
        n = pending.pop()
        for u in inside.intersection(n.users) - seen:
            seen.add(u)
            name = name_of(u)
            normed = name == "aten::batch_norm" and len(u.args) > 4 and u.args[4] is n
            power = name == "aten::pow" and u.args[1] in (0.5, -0.5)
            if normed or power or name in ("aten::sqrt", "aten::rsqrt"):
                return True
            if is_lowered(u) and (name in MOVING or name == "aten::add"):
                pending.append(u)
    return False


def indexed(n: fx.Node, index: fx.Node) -> int:
    """The size of the dimension that an operator reads at this index; of the smallest one where it
    may be any.
    """
    table = n.args[0]
    sizes = hinted(table.meta["val"].shape)
    if name_of(n) == "aten::embedding":
        return sizes[0]
    if name_of(n) in ("aten::gather", "aten::index_select") and isinstance(n.args[1], int):
        return sizes[n.args[1]] if sizes else 1
    if name_of(n) == "aten::index":
        if all(i is None or is_index(i) for i in n.args[1]):  # masks would take several dimensions
            own = [size for i, size in zip(n.args[1], sizes, strict=False) if i is index]
            return min(own or sizes)
    if name_of(n).startswith(("aten::cross_entropy", "aten::nll")):
        return sizes[1 if len(sizes) > 1 else 0]
    return min(sizes)


def chain_of(a: fx.Node, others: Set[fx.Node] = frozenset()) -> list[fx.Node]:
    """The operators that compute a mask or ids without floats, and their inputs, in graph order;
    empty if floats take part. With `others`: the operators that compute it from some of these.
    """
    chain: set[fx.Node] = set()
    met, pending = not others, [a] if a.op == "call_function" else []
    while pending:
        n = pending.pop()
        met |= n in others
        if n in chain or n in others:
            continue
        chain.add(n)
        if len(chain) > LONGEST or not simple(n):
            return []
        pending += elements_read(n)
    return sorted(chain) if met else []


def elements_read(n: fx.Node) -> list[fx.Node]:
    """The arguments of whose elements the result depends: of y in `x.expand_as(y)`, and of x in
    `torch.ones_like(x)`, only shape and dtype count.
    """
    name = name_of(n)
    made = name.endswith("_like") or name.startswith("aten::new_")
    shape = n.args[0] if made else n.args[1] if name in SHAPED else None
    return [a for a in n.all_input_nodes if a is not shape]


def unknown(chain: list[fx.Node]) -> bool:
    """Is there no chain, or does its value depend on elements of a tensor that the graph is given,
    as a buffer is, too? A single number does not count: positions begin with it.
    """
    pending, seen = chain[-1:], set()
    while pending:
        n = pending.pop()
        value = n.meta.get("val")
        if n.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim():
            return True
        pending += [a for a in elements_read(n) if a not in seen]
        seen.update(pending)
    return not chain


def computed(
    chain: list[fx.Node], device: torch.device, known: Mapping[fx.Node, torch.Tensor] = EMPTY
) -> torch.Tensor:
    """The value of the last node of a chain, with ones and zeros for inputs of the graph whose
    values are not known.
    """
    values: dict[fx.Node, object] = dict(known)
    for n in chain:
        values[n] = run(n, values, device)
    return values[chain[-1]]


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
        laid_out = room(value, place(value, device))[1]
        content = masking(value, laid_out.device)
        return content if overlaps_itself(laid_out) else laid_out.copy_(content)
    if counts_documents(n) and value.dim() and unknown(chain_of(n)):
        return documents(value, n.args[1], place(value, device))
    known = {a: values[a] if a in values else shaped(a, device) for a in n.all_input_nodes}
    args, kwargs = fx.map_arg((n.args, n.kwargs), known.__getitem__)
    args, kwargs = pytree.tree_map_only(NUMBERS, number, (args, kwargs))
    if name_of(n) == "aten::index":  # made-up, an index may be out of range
        sizes = args[0].shape
        args = (args[0], [within(i, size) for i, size in zip(args[1], sizes, strict=False)])
    names = [argument.name for argument in schema_of(n.target).arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "device" in names:
        given["device"] = place(value, device)
    return n.target(**given)


def shaped(a: fx.Node, device: torch.device) -> torch.Tensor:
    """A tensor of which only shape and dtype count, in the memory of one number."""
    value = a.meta["val"]
    one = torch.zeros((), dtype=value.dtype, device=place(value, device))
    return one.expand(hinted(value.shape))


def within(index: torch.Tensor | None, size: int) -> torch.Tensor | None:
    return None if index is None else index % max(1, size)
