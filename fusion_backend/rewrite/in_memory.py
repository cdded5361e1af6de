"""Cosines and sines of positions, written to memory once instead of computed wherever they are
read.

Inductor computes an elementwise function again in every kernel that reads it, and for every element
that the kernel writes. Models of transformers compute the cosines and sines of rotary position
embedding in each call; Inductor then computes them again for each head of each layer, forward and
backward.

The graphs are those that AOTAutograd hands to Inductor, forward or backward: nothing is written to
in between, and nothing here depends on autograd.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import forced_into_memory, hinted
from fusion_backend.decide.neighbours import elementwise, reduces
from fusion_backend.reporting.places import location

aten = torch.ops.aten
FUNCTIONS = {aten.cos.default: "cos", aten.sin.default: "sin"}
MANY = 1 << 24  # at least so many elements of other results are computed from a value
TIMES = 8  # and at least so many for each of its own
LARGEST = 1 << 22  # elements of a value that is kept


def keep_in_memory(gm: fx.GraphModule) -> list[str]:
    """Have Inductor write such values to memory. Returns a sentence for each, with its place in the
    user's code.
    """
    told: dict[fx.Node, str] = {}
    for n in gm.graph.nodes:
        if n.target in FUNCTIONS and fixed(n) and on_gpu(n):
            value = narrowest(n)
            own, again = elements(value), computed_from(value)
            result = any(user.op == "output" for user in value.users)  # in memory in any case
            large = own <= LARGEST and again >= max(MANY, TIMES * own)
            if large and not result and not reduced(value):
                told[value] = (
                    f"{FUNCTIONS[n.target]} at {location(n)}: {again:,} elements of other results "
                    f"are computed from its {own:,}"
                )
    for value in told:
        forced_into_memory(value)
    if told:
        gm.recompile()
    return [*told.values()]


def narrowest(n: fx.Node) -> fx.Node:
    """The last value of as many elements that is computed from this one and no other, such as a
    cast of it; not one in a wider dtype.
    """
    found, at = n, n
    while len(at.users) == 1:
        (at,) = at.users
        alone = elementwise(at) and len(at.all_input_nodes) == 1 and fixed(at)
        if not alone or elements(at) != elements(n):
            break
        if not views(at) and at.meta["val"].itemsize <= found.meta["val"].itemsize:
            found = at
    return found


def computed_from(value: fx.Node) -> int:
    """How many elements elementwise results have that are computed from this value and are larger
    than it. Inductor computes it for each of them. Of a chain of such results, which one kernel
    computes, only the last counts. Values of its own size are looked through, and so are views.
    """
    own, last = elements(value), set()
    pending, seen = [*value.users], set()
    while pending:
        n = pending.pop()
        if n in seen or not elementwise(n):
            continue
        seen.add(n)
        if views(n) or elements(n) <= own:
            pending += n.users
        else:
            last.add(end(n))
    return sum(map(elements, last))


def end(n: fx.Node) -> fx.Node:
    """The last of a chain of elementwise results of one size, each of which only the next reads."""
    while len(n.users) == 1:
        (user,) = n.users
        if views(user) or not elementwise(user) or elements(user) != elements(n):
            break
        n = user
    return n


def reduced(value: fx.Node) -> bool:
    """Is it computed from a reduction of a larger value? Inductor may compute all three in one
    kernel, which reads the larger one once.
    """
    pending, seen = [value], set()
    while pending:
        n = pending.pop()
        for a in n.all_input_nodes:
            if a.op != "call_function" or a in seen:
                continue
            seen.add(a)
            larger = any(elements(b) > elements(value) for b in a.all_input_nodes)
            if reduces(name_of(a)) and larger:
                return True
            if elementwise(a):
                pending.append(a)
    return False


def elements(n: fx.Node) -> int:
    """The number of elements of a result; 0 where it depends on data, or there is no tensor."""
    value = n.meta.get("val")
    sizes = hinted(value.shape) if isinstance(value, torch.Tensor) else None
    return math.prod(sizes) if sizes is not None else 0


def views(n: fx.Node) -> bool:
    return is_lowered(n) and n.target.is_view


def fixed(n: fx.Node) -> bool:
    """Is it a tensor whose sizes are numbers?"""
    value = n.meta.get("val")
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape)


def on_gpu(n: fx.Node) -> bool:
    """On a CPU Inductor writes such values to memory itself."""
    return n.meta["val"].device.type == "cuda"
