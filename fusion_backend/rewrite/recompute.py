"""Arguments that the backward computes again instead of keeping them.

An op whose backward is a kernel keeps its arguments. If one is a cheap function of a value that
autograd keeps anyway, as in layer_norm(gelu(z)), the op keeps one tensor more than plain Inductor,
which computes gelu(z) again from z. The mark of activation checkpointing on such nodes makes
AOTAutograd's partitioner do the same here; the backward then holds one such argument at a time.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_elementwise, name_of
from fusion_backend.decide.gate import Decision
from fusion_backend.decide.neighbours import library_call, reduces

# Elementwise functions whose derivative reads their argument: it is kept for backward. (relu, tanh,
# sigmoid and exp read their result: that is kept in any case.)
READS_ARGUMENT = {
    "abs",
    "cos",
    "elu",
    "erf",
    "gelu",
    "leaky_relu",
    "log",
    "mish",
    "silu",
    "sin",
    "softplus",
}
LONGEST = 8  # operators computed again for one argument
# after every checkpointed region
MARK = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1 << 30}


def computed_again(view: View, decisions: list[Decision]) -> set[fx.Node]:
    """The nodes of the view that the backward should compute again: those that compute arguments of
    its kernels. If such a node belongs to another site, all of that site is computed again, so it
    may hold no matrix product, of which an activation can be part, and no reduction.
    """
    found: set[fx.Node] = set()
    sites = [{*d.match.roots, *d.match.interior} for d in decisions]
    costly = {n for nodes in sites if any(map(expensive, nodes)) for n in nodes}
    for d, inside in zip(decisions, sites, strict=True):
        if d.backward == "kernel":
            for a in d.match.tensors.values():
                if isinstance(a, fx.Node):
                    found |= chain(view, a, inside, costly)
    return found


def expensive(n: fx.Node) -> bool:
    """Does it cost more than reading and writing its elements? Then it is kept."""
    return library_call(name_of(n)) or reduces(name_of(n))


def chain(
    view: View, argument: fx.Node, inside: set[fx.Node], costly: set[fx.Node]
) -> set[fx.Node]:
    """The elementwise operators from a value that is kept anyway to the argument; empty if there is
    no such chain, or if one of them is costly.
    """
    nodes: list[fx.Node] = []
    again: set[fx.Node] = set()
    n = argument
    while (
        len(nodes) < LONGEST
        and is_elementwise(n)
        and n not in costly
        and all(u in inside or is_elementwise(u) for u in n.users)
    ):
        tensors = [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        if len(tensors) != 1 or not same(tensors[0].meta["val"].shape, n.meta["val"].shape):
            break
        nodes.append(n)
        source = tensors[0]
        smaller = source.meta["val"].dtype.itemsize <= argument.meta["val"].dtype.itemsize
        if (
            n.target.overloadpacket.__name__ in READS_ARGUMENT
            and source in view.requires_grad
            and smaller
        ):
            again = set(nodes)
        n = source
    return again
