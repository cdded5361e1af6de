"""Where a graph is cut for the buckets of DistributedDataParallel.

Dynamo cuts as soon as the parameters behind the cut fill a bucket. That is anywhere in a layer:
what belongs together is compiled apart, and everything that passes the cut is written to memory and
kept. Here the cut moves on towards the start of the graph, to the next operator with weights in
front of which few bytes pass. In a transformer that is the first one behind a norm, or behind
attention: the residual stream and what the operator reads are in memory in any case.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor, fx

from fusion_backend.capture.cut_graphs import is_call
from fusion_backend.capture.sizes import is_dense, nbytes
from fusion_backend.compat.torch import pytree

# A part grows by at most a quarter of all parameters: their gradients are sent when its backward
# ends.
PARTS = 4
RESHAPES = {"view", "reshape", "flatten", "unflatten"}


def first_nodes(gm: fx.GraphModule, bucket: int, first_bucket: int) -> set[fx.Node] | None:
    """The node that each part begins with, but for the part at the start of the graph. None if
    the graph has parameters that are no inputs, or no operator with weights.

    bucket: the bytes of parameters that are enough for a part. first_bucket: the same of the part
    at the end of the graph, whose gradients come first.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    passing = bytes_passing(nodes)
    places = [] if any(holds_parameters(gm, n) for n in nodes) else places_of(nodes, passing)
    if not places:
        return None
    own = bytes_of_parameters(nodes)
    before = [*itertools.accumulate(own, initial=0)]
    more = max(bucket, before[-1] // PARTS)
    few = sorted(passing[at] for at in places)[len(places) // 4]
    found: set[fx.Node] = set()
    size, at = 0, len(nodes) - 1
    while at > 0:
        size += own[at]
        if size >= (bucket if found else first_bucket):
            near = [p for p in reversed(places) if p <= at and before[at] - before[p] <= more]
            at = best_place(near, passing, few, at)
            found.add(nodes[at])
            size = 0
        at -= 1
    return found


def holds_parameters(gm: fx.GraphModule, n: fx.Node) -> bool:
    """May the node have parameters that are no inputs of the graph?"""
    if n.op == "get_attr":
        return isinstance(operator.attrgetter(n.target)(gm), torch.nn.Parameter)
    return n.op == "call_module"


def best_place(near: list[int], passing: list[int], few: int, otherwise: int) -> int:
    """The first of these places that no more than `few` bytes pass; if there is none, the one that
    the fewest bytes pass.
    """
    good = (at for at in near if passing[at] <= few)
    return next(good, min(near, key=passing.__getitem__, default=otherwise))


def places_of(nodes: list[fx.Node], passing: list[int]) -> list[int]:
    """Where the graph may be cut: in front of each operator with weights. If calls right before it
    are read by it alone, and compute its weights or reshape its input, in front of these.
    """
    weights: set[fx.Node] = set()  # what is computed from parameters alone
    places = []
    for at, n in enumerate(nodes):
        read = n.all_input_nodes
        if read and all(is_parameter(m) or m in weights for m in read):
            weights.add(n)
        elif any((is_parameter(m) or m in weights) and dimensions(m) > 1 for m in read):
            first, inside = at, {n}
            while first > 1 and goes_with(nodes[first - 1], inside, weights, passing, first):
                first -= 1
                inside.add(nodes[first])
            if first:
                places.append(first)
    return places


def goes_with(
    n: fx.Node, inside: set[fx.Node], weights: set[fx.Node], passing: list[int], first: int
) -> bool:
    """Does the call right before place `first` belong to the same part?"""
    if not inside.issuperset(n.users):
        return False
    return n in weights or (is_call(n, RESHAPES) and passing[first - 1] <= passing[first])


def is_parameter(n: fx.Node) -> bool:
    return isinstance(n.meta.get("example_value"), torch.nn.Parameter) and n.op == "placeholder"


def dimensions(n: fx.Node) -> int:
    value = n.meta.get("example_value")
    return value.dim() if isinstance(value, Tensor) else 0


def bytes_of_parameters(nodes: list[fx.Node]) -> list[int]:
    """Of each node the bytes of the trained parameters that no later node reads."""
    seen: set[fx.Node] = set()
    sizes = []
    for n in reversed(nodes):
        new = {m for m in n.all_input_nodes if is_parameter(m)} - seen
        seen |= new
        values = [m.meta["example_value"] for m in new]
        sizes.append(sum(nbytes(v) for v in values if v.requires_grad))
    return sizes[::-1]


def bytes_passing(nodes: list[fx.Node]) -> list[int]:
    """Of each node the bytes that are computed before it and read by it or later. Views of a tensor
    count as tensors.
    """
    places = {n: at for at, n in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for at, n in enumerate(nodes):
        last = max((places[m] for m in n.users if m in places), default=at)
        values = [v for v in pytree.tree_leaves(n.meta.get("example_value")) if is_dense(v)]
        size = sum(map(nbytes, values))
        changes[at + 1] += size
        changes[last + 1] -= size
    return [*itertools.accumulate(changes[:-1])]
