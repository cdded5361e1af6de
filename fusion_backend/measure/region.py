"""A region: sites and everything that Inductor could fuse with them, up to the library calls on its
edge.

Nodes of one region have the same *level*: the number of library calls on the longest path to them.
No path leads out of a level and back, so a region can be cut out as a graph of its own. A
convolution belongs to the regions it touches, because Inductor chooses its layout together with
theirs; and so does a matrix product whose rows Inductor pads, or whose bias it adds in the region.
Elementwise operators of later levels, in training all that Inductor could fuse, and `argmax`, are
in the region whose value they read. Their other operands are made up, even if they depend on it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.view import is_lowered, is_mutation, name_of
from fusion_backend.compat.distributed import collective
from fusion_backend.compat.torch import FakeTensor, hinted
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.gate import Decision
from fusion_backend.decide.neighbours import elementwise, library_call
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.kernels.common.inputs import dense
from fusion_backend.measure.indices import (
    GATHERING,
    INDEXING,
    MOVING,
    is_index,
    known_range,
    tensors,
    whole_numbers,
)

PRODUCTS = {f"aten::{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")}
# Inductor's padding_stride_threshold, in elements, and padding_alignment_bytes.
LONG_ROW, ALIGNED = 1024, 128
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
MOST_NODES = 256
# Operators that stop the GPU if their values are made up: too few elements for a mask, or numbers
# that are no probabilities.
PARTICULAR = {
    f"aten::{name}"
    for name in """
    masked_scatter bernoulli multinomial normal poisson binomial binary_cross_entropy _assert_async
    """.split()
}
ARGMAX = {"aten::argmax", "aten::argmin"}
JOINING = {"aten::cat", "aten::concat", "aten::stack"}  # computed by what reads them, too


@dataclasses.dataclass
class Region:
    """nodes: in graph order, those of the sites among them. sites: the decisions that are decided
    together. problem: why it cannot be measured; "" where it can. again: those of the nodes that
    belong to an earlier region, such as a cast of an argument of a site. biases: those that are
    products whose bias Inductor adds in the region.
    """

    nodes: list[fx.Node]
    sites: list[Decision]
    problem: str = ""
    again: frozenset[fx.Node] = frozenset()
    biases: frozenset[fx.Node] = frozenset()


def regions(facts: Facts, decisions: Iterable[Decision]) -> list[Region]:
    """The regions around these sites. No site is in two; sites whose regions meet share one."""
    return Regions(facts, [*decisions]).found()


class Regions:
    """The regions of one view."""

    def __init__(self, facts: Facts, decisions: list[Decision]):
        self.view, self.writers, self.decisions = facts.view, facts.writers, decisions
        self.nodes = [*self.view.graph.nodes]
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.inside: dict[fx.Node, list[Decision]] = {}
        for d in decisions:
            for n in (*d.match.interior, *d.match.roots):
                self.inside.setdefault(n, []).append(d)
        # what is also read outside of a site, or in another one, such as a mask or a cast of an
        # argument, joins no regions
        self.site = {n: sites[0] for n, sites in self.inside.items() if alone(n, sites)}
        self.ended: dict[fx.Node, bool] = {}
        self.level = self.levels()

    def found(self) -> list[Region]:
        done: dict[int, Region] = {}
        for d in self.decisions:
            if id(d) not in done:
                region = self.around(d)
                done |= {id(s): region for s in region.sites}
        return [*{id(r): r for r in done.values()}.values()]

    def levels(self) -> dict[fx.Node, int]:
        """The level of each node. If only later levels read what a site, an elementwise operator or
        a gather computes, it belongs to the first of them, where Inductor computes it, and where it
        adds up the gradient of what is gathered. A mask that sites of several levels read inside
        keeps its level: it is computed once, and lies in memory for all.
        """

        def apart(n: fx.Node) -> bool:
            return len({level[d.match.roots[0]] for d in self.inside.get(n, ())}) > 1

        level: dict[fx.Node, int] = {}
        before: set[fx.Node] = set()  # inputs, and the integers that are computed from them alone
        for n in self.nodes:
            number = is_index(n) or not tensors(n)
            if before.issuperset(n.all_input_nodes) and (number or n.op != "call_function"):
                before.add(n)
            below = max((level[a] for a in n.all_input_nodes), default=0)
            level[n] = below + (n not in before and n not in self.site and self.ends(n))
        for d in self.decisions:
            roots = max(level[r] for r in d.match.roots)
            level |= dict.fromkeys(self.own(d), roots)

        def latest(nodes: Iterable[fx.Node]) -> int:
            """The last level at which these nodes can be computed in time for their readers."""
            readers = {u for n in nodes for u in n.users if u.op != "output"} - {*nodes}
            ends = {u: u not in self.site and self.ends(u) for u in readers}
            return min((level[u] - ends[u] for u in readers), default=0)

        for n in reversed(self.nodes):
            if n in self.site:
                nodes = self.own(self.site[n])
                level |= dict.fromkeys(nodes, max(level[n], latest(nodes)))
            elif n.users and (elementwise(n) or gathers(n)) and not apart(n):
                level[n] = max(level[n], latest([n]))
        return level

    def own(self, d: Decision) -> list[fx.Node]:
        """The nodes that are inside this site alone."""
        return [n for n in (*d.match.interior, *d.match.roots) if n in self.site]

    def ends(self, n: fx.Node) -> bool:
        """Does a region end there? It ends at operators that Inductor fuses with nothing, and at
        those that must not run on made-up values.
        """
        if n not in self.ended:
            self.ended[n] = self.edge(n)
        return self.ended[n]

    def edge(self, n: fx.Node) -> bool:
        if n.op != "call_function" or n.target is operator.getitem:
            return False
        if not is_lowered(n) or is_mutation(n) or n.target.namespace != "aten":
            return True
        if self.writers and not self.writers.keys().isdisjoint(storages(n)):
            return True  # each reader sees its value at another moment
        return library_call(name_of(n)) or not measurable(n) or not self.safe(n)

    def safe(self, n: fx.Node) -> bool:
        """May it run on made-up values? Integers that somebody reads are not computed inside a
        region. They are its inputs, and are made up in the range that is valid for the indexed
        tensor.
        """
        name = name_of(n)
        if name in PARTICULAR or any(map(whole_numbers, tensors_read(n))):
            return False
        known = name in INDEXING or name in MOVING or elementwise(n)
        return known or not any(map(is_index, n.all_input_nodes))

    def around(self, d: Decision) -> Region:
        sites, found, pending = {id(d): d}, set(), self.own(d)
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
                pending += self.own(other)
            for m in (*n.all_input_nodes, *n.users):
                same = self.level.get(m) == level and self.view.region.get(m) == state
                if m not in found and same and self.fusable(m):
                    pending.append(m)
        members = sorted(sites.values(), key=lambda s: self.order[s.match.roots[0]])
        again = frozenset(n for s in members for n in self.again(s) if n not in found)
        beside = self.beside(found, level, state)
        later = self.later(found, level, state)
        nodes = sorted(found | again | beside | later, key=self.order.__getitem__)
        problem = self.problem(nodes, found, again, members, later)
        return Region(nodes, members, problem, again, frozenset(filter(self.bias_apart, beside)))

    def again(self, d: Decision) -> list[fx.Node]:
        """The nodes inside a site that depend on its arguments alone. As inputs of the region they
        would be made up without regard to the arguments, which the replacement reads.
        """
        made: dict[fx.Node, None] = {}
        read = {*call_reads(d)}
        for n in sorted(d.match.interior, key=self.order.__getitem__):
            if n not in self.site and any(a in read or a in made for a in n.all_input_nodes):
                made[n] = None
        return [n for n in made if n not in read]

    def fusable(self, m: fx.Node) -> bool:
        if m in self.site:
            return True
        if m.target is operator.getitem:
            return self.fusable(m.args[0])
        return m.op == "call_function" and not self.ends(m)

    def beside(self, found: set[fx.Node], level: int, state: object) -> set[fx.Node]:
        """The library calls that belong to the region. Some decide how a value of it lies in
        memory: convolutions that make or read the value, and products that make it if Inductor pads
        their rows. The others are products whose bias Inductor adds in the region. Calls of earlier
        levels do not belong, because other library calls stand between.
        """
        makes = {m for n in found for m in n.all_input_nodes} - found
        near = makes | ({m for n in found for m in n.users} - found)
        of_aten = (m for m in near if is_lowered(m) and measurable(m))
        return {
            m
            for m in of_aten
            if self.level[m] in (level, level + 1)
            and self.view.region.get(m) == state
            and (convolution(m) or (m in makes and (padded(m) or self.bias_apart(m))))
        }

    def bias_apart(self, n: fx.Node) -> bool:
        """Is it a product in fp32 or fp64 whose bias Inductor leaves to the kernel that reads it?
        With a kernel of ours there the library adds the bias, and may take longer for it. In 16
        bits it does not.
        """
        wide = bias_of(n) is not None and n.meta["val"].element_size() > 2
        return wide and any(u in self.site for u in n.users) and all(map(elementwise, n.users))

    def later(self, found: set[fx.Node], level: int, state: object) -> set[fx.Node]:
        """The elementwise operators and concatenations of later levels that read a value of the
        region: Inductor may compute it once more for them. In training, all readers that it could
        fuse: it adds up their gradients where it computes the region's. Also convolutions that
        read these, which decide how they lie in memory, and what makes integers, such as `argmax`.
        """

        def read(nodes: set[fx.Node]) -> set[fx.Node]:
            """The later nodes that read one of these."""
            users = {u for n in nodes for u in n.users} - found
            return {u for u in users if self.level[u] > level and self.view.region.get(u) == state}

        readers = read(found)
        apart = {u for u in readers if elementwise(u) or name_of(u) in JOINING}
        apart |= {u for u in readers - self.site.keys() if is_lowered(u) and self.view.trains(u)}
        apart = {u for u in apart if not self.ends(u)}
        convolutions = {u for u in read(apart) if convolution(u) and measurable(u)}
        return apart | convolutions | {*filter(makes_integers, readers)}

    def beyond(self, a: fx.Node, root: fx.Node) -> bool:
        """Is an argument that needs no gradient, of a site that has one, computed in place or in
        another grad mode, as targets of a loss are? A region does not reach there; Inductor does.
        """
        value = a.meta.get("val")
        if a.op != "call_function" or not isinstance(value, torch.Tensor) or self.view.trains(a):
            return False
        if not value.is_floating_point() or not self.view.trains(root):
            return False
        other = self.view.region.get(a) != self.view.region.get(root)
        another = other and elementwise(a) and len(a.users) == 1
        return another or bool(self.writers) and not self.writers.keys().isdisjoint(storages(a))

    def problem(
        self,
        nodes: list[fx.Node],
        found: set[fx.Node],
        again: frozenset[fx.Node],
        sites: list[Decision],
        later: set[fx.Node],
    ) -> str:
        """Why a region cannot be measured; "" where it can."""
        if len(found) > MOST_NODES:
            return f"it stands among more than {MOST_NODES} operators that Inductor could fuse"
        if waits := next(
            (n for n in nodes if n.op == "call_function" and collective(n.target)), None
        ):
            return f"{waits.name} waits for other ranks"
        inside = set(nodes)
        read = [a for n in nodes for a in n.all_input_nodes]
        every = dict.fromkeys((*read, *(a for d in sites for a in call_reads(d)), *nodes))
        if wrong := next((n for n in every if not measurable(n)), None):
            return f"the sizes, or the value, of {wrong.name} depend on data"
        gpus = {str(t.device) for n in every for t in tensors(n) if t.device.type != "cpu"}
        if len(gpus) > 1:
            return f"it is computed on {' and '.join(sorted(gpus))}"
        arguments = (a for d in sites for a in call_reads(d) if a not in inside)
        if made := next((a for a in arguments if self.beyond(a, sites[0].match.roots[0])), None):
            return (
                f"{made.name} is computed in place or in another grad mode, which no trial has: "
                "Inductor may compute it together with what reads it"
            )
        for n in nodes:
            whole = [a for a in n.all_input_nodes if is_index(a)]
            if name_of(n) in INDEXING and not all(known_range(a, inside) for a in whole):
                return f"an index of {n.name} is computed inside the region, from its inputs"
        # a value that is computed from the region's results outside must not be read inside
        core = inside - later
        seen, level = set(), max(self.level[n] for n in core)
        pending = [u for n in core if n not in again for u in n.users if u not in inside]
        while pending:
            n = pending.pop()
            if n in seen or self.level[n] > level:
                continue
            seen.add(n)
            if not core.isdisjoint(n.users):
                return f"{n.name}, outside the region, reads its results and is read inside it"
            pending += n.users
        return ""


def alone(n: fx.Node, sites: list[Decision]) -> bool:
    """Is a node a result of a site, or inside this site and read nowhere else?"""
    match = sites[0].match
    inside = {*match.interior, *match.roots}
    return len(sites) == 1 and (n in match.roots or inside.issuperset(n.users))


def gathers(n: fx.Node) -> bool:
    return is_lowered(n) and name_of(n) in GATHERING


def makes_integers(n: fx.Node) -> bool:
    """Does it make integers, in a kernel that Inductor fuses with its operand's?"""
    fused = elementwise(n) or (is_lowered(n) and name_of(n) in ARGMAX)
    return fused and is_index(n) and not is_mutation(n) and measurable(n)


def convolution(n: fx.Node) -> bool:
    return is_lowered(n) and name_of(n).startswith("aten::conv")


def copies_nothing(convolutions: list[fx.Node], inputs: list[fx.Node]) -> bool:
    """Are the results of the convolutions, and all images among the inputs of their region, known
    to be in channels-last, so that Inductor copies none of them to that format? Weights that are
    inputs of the graph it copies in any case.
    """
    weights = {n.args[1] for n in convolutions if len(n.args) > 1}
    given = {n for n in weights if isinstance(n, fx.Node) and n.op == "placeholder"}
    values = (n.meta.get("val") for n in inputs if n not in given)
    images = [t for t in values if isinstance(t, torch.Tensor) and t.is_floating_point()]
    images = [t for t in images if t.dim() > 3] + [n.meta["val"] for n in convolutions]
    return all(t.dim() > 3 and dense(t, [0, *range(2, t.dim()), 1]) for t in images)


def call_reads(d: Decision) -> list[fx.Node]:
    """The nodes that the replacement of a site reads."""
    nodes = (a.node if isinstance(a, Viewed) else a for a in d.call.args)
    return [n for n in nodes if isinstance(n, fx.Node)]


def tensors_read(n: fx.Node) -> list[torch.Tensor]:
    """Those of its tensors that somebody reads: of `max` over a dimension mostly the values, and
    not where they are.
    """
    if not isinstance(n.meta.get("val"), (tuple, list)):
        return tensors(n)
    readers = (u for u in n.users if u.users)
    return [t for u in readers for t in tensors(u if u.target is operator.getitem else n)]


def measurable(n: fx.Node) -> bool:
    """Are its values ordinary tensors on a GPU, or numbers, of sizes that are known?"""
    value = n.meta.get("val")
    if isinstance(value, NUMBERS):
        return value.node.has_hint()
    return all(
        type(v) is FakeTensor
        and v.layout == torch.strided
        and hinted((*v.shape, *v.stride(), v.storage_offset())) is not None
        for v in tensors(n)
    )


def padded(n: fx.Node) -> bool:
    """Is it a matrix product between whose rows Inductor leaves room, so that each begins at a
    multiple of 128 bytes?
    """
    if name_of(n) not in PRODUCTS:
        return False
    row = (hinted(n.meta["val"].shape) or (0,))[-1]
    return row > LONG_ROW and row * n.meta["val"].element_size() % ALIGNED != 0


def bias_of(n: fx.Node) -> object:
    """The vector that a product adds to its rows, or None."""
    if name_of(n) == "aten::linear":
        return n.args[2] if len(n.args) > 2 else n.kwargs.get("bias")
    vector = name_of(n) == "aten::addmm" and n.args[0].meta["val"].dim() == 1
    return n.args[0] if vector else None
