"""Where a graph is cut for the buckets of DistributedDataParallel.

Dynamo cuts as soon as the parameters behind the cut fill a bucket. That is anywhere in a layer:
what belongs together is compiled apart, and everything that passes the cut is written to memory and
kept. Here the cut moves on towards the start of the graph, to the next operator with weights in
front of which few bytes pass. In a transformer that is the first one behind a norm, or behind
attention: the residual stream and what the operator reads are in memory in any case.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, fx

from fusion_backend.compat.torch import hinted, pytree

# A part may grow by a quarter of all parameters: their gradients are sent in no fewer than about
# four steps, and all but the last of these beside the backward.
PARTS = 4
RESHAPES = {"view", "reshape", "flatten", "unflatten"}


def first_nodes(gm: fx.GraphModule, bucket: int, first_bucket: int) -> set[fx.Node]:
    """The node that each part begins with, but for the part at the start of the graph.

    bucket: bytes of parameters that a part has at least, and the one at the end of the graph
    first_bucket.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    own, passing = bytes_of_parameters(nodes), bytes_passing(nodes)
    weighty = [at for at, n in enumerate(nodes) if at and reads_weights(n)]
    before = [*itertools.accumulate(own, initial=0)]
    more = max(bucket, before[-1] // PARTS)
    found: set[fx.Node] = set()
    size, at = 0, len(nodes) - 1
    while at > 0 and weighty:
        size += own[at]
        if size >= (bucket if found else first_bucket):
            place = best_place(at, weighty, before, passing, more)
            if place is not None:
                at = with_reshapes(place, nodes, passing)
                found.add(nodes[at])
                size = 0
        at -= 1
    return found


def best_place(
    last: int, weighty: list[int], before: list[int], passing: list[int], more: int
) -> int | None:
    """The last of these places, up to `last`, where as few bytes pass as at a quarter of them; else
    the one where the fewest do. Between it and `last` are at most `more` bytes of parameters:
    `before` has those that all nodes before a place read. None if there is no such place.
    """
    few = sorted(passing[at] for at in weighty)[len(weighty) // 4]
    near = [at for at in reversed(weighty) if at <= last and before[last] - before[at] <= more]
    good = (at for at in near if passing[at] <= few)
    return next(good, min(near, key=passing.__getitem__, default=None))


def with_reshapes(at: int, nodes: list[fx.Node], passing: list[int]) -> int:
    """Reshapes right before a node, through which it reads what passes, go with it: the rows of a
    layer are then known to be those of a tensor.
    """
    while at > 1 and name_of(nodes[at - 1]) in RESHAPES and passing[at - 1] <= passing[at]:
        at -= 1
    return at


def name_of(n: fx.Node) -> str:
    return n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")


def reads_weights(n: fx.Node) -> bool:
    """Is it an operator of a matrix that is trained, as a linear layer or a convolution is?"""
    given = (m.meta.get("example_value") for m in n.all_input_nodes if m.op == "placeholder")
    trained = any(isinstance(v, torch.nn.Parameter) and v.dim() > 1 for v in given)
    return trained and n.op == "call_function"


def bytes_of_parameters(nodes: list[fx.Node]) -> list[int]:
    """Of each node the bytes of the trained parameters that no later node reads."""
    seen: set[fx.Node] = set()
    sizes = []
    for n in reversed(nodes):
        new = {m for m in n.all_input_nodes if m.op == "placeholder"} - seen
        seen |= new
        values = [m.meta.get("example_value") for m in new]
        trained = (v for v in values if isinstance(v, torch.nn.Parameter) and v.requires_grad)
        sizes.append(sum(size_of(v) for v in trained))
    return sizes[::-1]


def bytes_passing(nodes: list[fx.Node]) -> list[int]:
    """Of each node the bytes that are computed before it and read by it or later."""
    places = {n: at for at, n in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for at, n in enumerate(nodes):
        last = max((places[m] for m in n.users if m in places), default=at)
        size = sum(size_of(v) for v in pytree.tree_leaves(n.meta.get("example_value")))
        changes[at + 1] += size
        changes[last + 1] -= size
    passing = []
    for change in changes[:-1]:
        passing.append(change + (passing[-1] if passing else 0))
    return passing


def size_of(value: object) -> int:
    """The bytes of a tensor, with symbolic sizes as in the example; else 0."""
    if not isinstance(value, Tensor):
        return 0
    sizes = hinted(value.shape)
    return 0 if sizes is None else math.prod(sizes) * value.itemsize
