"""Where a graph is cut for the buckets of DistributedDataParallel.

Dynamo cuts as soon as the parameters behind the cut fill a bucket. That is anywhere in a layer:
what belongs together is compiled apart, and everything that passes the cut is written to memory and
kept. Here the cut moves on towards the start of the graph, to a layer with weights in front of
which the fewest bytes pass. In a transformer that is the first layer behind a norm: the residual
stream and the result of the norm are in memory in any case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fusion_backend.compat.torch import hinted, pytree

# A part may grow by a quarter of all parameters: their gradients are sent in no fewer than about
# four steps, and all but the last of these beside the backward.
PARTS = 4


def first_nodes(gm: fx.GraphModule, bucket: int, first_bucket: int) -> set[fx.Node]:
    """The node that each part begins with, but for the part at the start of the graph.

    bucket: bytes of parameters that a part has at least, and the one at the end of the graph
    first_bucket. Every part begins with a call_function.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    own = bytes_of_parameters(nodes)
    passing = bytes_passing(nodes)
    more = max(bucket, sum(own) // PARTS)
    found: set[fx.Node] = set()
    size, at = 0, len(nodes) - 1
    while at > 0:
        size += own[at]
        full = size >= (bucket if found else first_bucket)
        place = best_place(at, nodes, own, passing, more) if full else None
        if place is not None:
            found.add(nodes[place])
            size, at = 0, place
        at -= 1
    return found


def best_place(
    last: int, nodes: list[fx.Node], own: list[int], passing: list[int], more: int
) -> int | None:
    """The layer with weights in front of which the fewest bytes pass, and the last of several such:
    at most `last`, and with no more than `more` bytes of parameters between. Where there is none,
    another call_function; None if there is none, either.
    """
    best, least, between = None, None, 0
    for at in range(last, 0, -1):
        between += own[at] if at < last else 0
        if between > more:
            break
        cost = not reads_weights(nodes[at]), passing[at]
        if nodes[at].op == "call_function" and (least is None or cost < least):
            best, least = at, cost
    return best


def reads_weights(n: fx.Node) -> bool:
    given = (m.meta.get("example_value") for m in n.all_input_nodes if m.op == "placeholder")
    return any(isinstance(v, torch.nn.Parameter) and v.dim() > 1 for v in given)


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
