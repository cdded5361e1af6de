"""A region: sites, and all that Inductor could fuse with them, up to the library calls on its edge.

Nodes of one region have the same *level*: the number of library calls on the longest path to them.
No path leads out of a level and back, so a region can be cut out as a graph of its own. A
convolution belongs to the regions it touches, because Inductor chooses its layout together with
theirs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.capture.view import View, is_lowered, is_mutation, name_of
from fusion_backend.compat.torch import FakeTensor, hinted, pytree
from fusion_backend.decide.gate import Decision
from fusion_backend.decide.neighbours import elementwise, library_call
from fusion_backend.match.matcher import Match

MOST_NODES = 256
# Operators that read memory at an index: out of range, the index stops the GPU for good.
INDEXING = {
    f"aten::{name}"
    for name in (
        "embedding",
        "gather",
        "index",
        "index_select",
        "take",
        "take_along_dim",
        "cross_entropy_loss",
        "nll_loss",
        "nll_loss_nd",
        "nll_loss2d",
    )
}
# Their result has no element that their first argument, or a number, does not have.
MOVING = {
    f"aten::{name}"
    for name in """
    view reshape _unsafe_view unsqueeze squeeze expand expand_as permute transpose t mT slice select
    contiguous clone alias detach flatten unflatten _to_copy to split split_with_sizes chunk unbind
    constant_pad_nd pad
    """.split()
}


@dataclasses.dataclass
class Region:
    """nodes: in graph order, those of the sites among them. sites: the decisions that are decided
    together. problem: why it cannot be measured; "" where it can.
    """

    nodes: list[fx.Node]
    sites: list[Decision]
    problem: str = ""


def regions(
    view: View, decisions: list[Decision], computed: Callable[[Match], list[fx.Node]]
) -> list[Region]:
    """The regions around these sites; no two overlap, and sites that share one are together.
    `computed`: what a site computes that no other site does, views and casts of arguments left out.
    """
    return Regions(view, {id(d): (d, computed(d.match)) for d in decisions}).found()


class Regions:
    """The regions of one view."""

    def __init__(self, view: View, sites: dict[int, tuple[Decision, list[fx.Node]]]):
        self.view, self.sites = view, sites
        self.nodes = [*view.graph.nodes]
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.site: dict[fx.Node, Decision] = {}
        for d, members in sites.values():
            self.site |= dict.fromkeys(members, d)
        self.ended: dict[fx.Node, bool] = {}
        self.level = self.levels()

    def found(self) -> list[Region]:
        done: dict[int, Region] = {}
        for d, _ in self.sites.values():
            if id(d) not in done:
                region = self.around(d)
                done |= {id(s): region for s in region.sites}
        return [*{id(r): r for r in done.values()}.values()]

    def levels(self) -> dict[fx.Node, int]:
        """The level of each node. What an elementwise operator computes for later levels alone
        belongs to the first of them, where Inductor computes it.
        """
        level: dict[fx.Node, int] = {}
        for n in self.nodes:
            below = max((level[a] for a in n.all_input_nodes), default=0)
            level[n] = below + (n not in self.site and self.ends(n))
        for d, members in self.sites.values():
            level |= dict.fromkeys(members, max(level[r] for r in d.match.roots))
        for n in reversed(self.nodes):
            if n.users and n not in self.site and elementwise(n):
                latest = min(level[u] - (u not in self.site and self.ends(u)) for u in n.users)
                level[n] = max(level[n], latest)
        return level

    def ends(self, n: fx.Node) -> bool:
        """Does a region end there? At what Inductor fuses with nothing, and what is not to be run
        on made-up values.
        """
        if n not in self.ended:
            self.ended[n] = self.edge(n)
        return self.ended[n]

    def edge(self, n: fx.Node) -> bool:
        if n.op != "call_function" or n.target is operator.getitem:
            return False
        if not is_lowered(n) or is_mutation(n) or n.target.namespace != "aten":
            return True
        return library_call(name_of(n)) or not measurable(n) or not self.safe(n)

    def safe(self, n: fx.Node) -> bool:
        """Does it read memory at no index, or at one that is an input, whose range is known?"""
        if name_of(n) not in INDEXING:
            return True
        whole = [a for a in n.all_input_nodes if is_index(a)]
        return all(given(a).op == "placeholder" or self.ends(given(a)) for a in whole)

    def around(self, d: Decision) -> Region:
        sites, found, pending = {id(d): d}, set(), [*self.sites[id(d)][1]]
        state = self.view.region.get(d.match.roots[0])
        level = self.level[d.match.roots[0]]
        while pending and len(found) <= MOST_NODES:
            n = pending.pop()
            if n in found:
                continue
            found.add(n)
            if n in self.site and id(self.site[n]) not in sites:
                other = self.site[n]
                sites[id(other)] = other
                pending += self.sites[id(other)][1]
            for m in (*n.all_input_nodes, *n.users):
                same = self.level.get(m) == level and self.view.region.get(m) == state
                if m not in found and same and self.fusable(m):
                    pending.append(m)
        nodes = sorted(found | self.convolutions(found, level), key=self.order.__getitem__)
        members = sorted(sites.values(), key=lambda s: self.order[s.match.roots[0]])
        return Region(nodes, members, self.problem(nodes, found))

    def fusable(self, m: fx.Node) -> bool:
        if m in self.site:
            return True
        if m.target is operator.getitem:
            return self.fusable(m.args[0])
        return m.op == "call_function" and not self.ends(m)

    def convolutions(self, found: set[fx.Node], level: int) -> set[fx.Node]:
        """Those that make or read a value of the region; not those of earlier levels, whose results
        other convolutions stand between.
        """
        beside = {m for n in found for m in (*n.all_input_nodes, *n.users)} - found
        return {
            m
            for m in beside
            if self.level[m] in (level, level + 1)
            and is_lowered(m)
            and name_of(m).startswith("aten::conv")
            and measurable(m)
        }

    def problem(self, nodes: list[fx.Node], found: set[fx.Node]) -> str:
        """Why a region cannot be measured; "" where it can."""
        if len(found) > MOST_NODES:
            return f"it stands among more than {MOST_NODES} operators that Inductor could fuse"
        if wrong := next((n for n in nodes if not measurable(n)), None):
            return f"the sizes of {wrong.name} depend on data"
        # what is computed outside from the region's results must not come back into it
        inside, seen, level = set(nodes), set(), max(self.level[n] for n in nodes)
        pending = [u for n in nodes for u in n.users if u not in inside]
        while pending:
            n = pending.pop()
            if n in seen or self.level[n] > level:
                continue
            seen.add(n)
            if not inside.isdisjoint(n.users):
                return f"{n.name} is computed outside of it from its results, and read in it"
            pending += n.users
        return ""


def measurable(n: fx.Node) -> bool:
    """Are its values ordinary tensors on a GPU, or numbers, of sizes that are known?"""
    values = [v for v in pytree.tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)]
    return all(
        type(v) is FakeTensor
        and v.layout == torch.strided
        and hinted((*v.shape, *v.stride(), v.storage_offset())) is not None
        for v in values
    )


def is_index(n: fx.Node) -> bool:
    value = n.meta.get("val")
    whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return whole and value.dtype != torch.bool


def given(n: fx.Node) -> fx.Node:
    """What the elements of `n` come from, through operators that only move them."""
    while (is_lowered(n) and name_of(n) in MOVING) or n.target is operator.getitem:
        n = n.args[0]
    return n
