"""Matches of row kernels -> larger matches, with the elementwise code around them.

From the result of a match its readers are followed as long as they are elementwise and in the end
one value is left that others read; from its arguments, the operators that compute them, as long as
nobody else reads what they compute. Where the gate leaves the match itself to Inductor, because a
kernel of its own would cut it off from this code, it may take the larger one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import View, is_lowered, is_mutation, name_of
from fusion_backend.extend.generated_rows import generated_rows
from fusion_backend.extend.translate import ACROSS, NoProgram, Translation, fits, step
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.edges import STRICT
from fusion_backend.ir.expr import Expr, peel
from fusion_backend.kernels.generated.adjoint import columns_of
from fusion_backend.match.match import Match
from fusion_backend.match.matcher import Matcher
from fusion_backend.match.templates import Template
from fusion_backend.options import Options

EXTENDED = ("layer_norm", "rms_norm", "l2_norm", "softmax")
FAR = 200  # nodes behind a result to look at
MOST_NODES = 64  # to add


def extends(options: Options) -> bool:
    """May an extended match be fused? It is for the gate to measure; `fusion.gate=always` takes the
    patterns themselves, and an extension only if `fusion.only` names it.
    """
    name, only = generated_rows.name, options.only
    allowed = name not in options.skip and (not only or name in only)
    return allowed and options.gate != "never" and (options.gate != "always" or bool(only))


def extensions(view: View, canon: Canon, matcher: Matcher, matches: list[Match]) -> Iterator[Match]:
    """A match of `generated_rows` for each of these that has code around it, unless another match
    has the same code.
    """
    inside: dict[fx.Node, list[set[fx.Node]]] = {}  # a result -> the nodes of each match with it
    for match in matches:
        for root in match.roots:
            inside.setdefault(root, []).append({*match.interior, *match.roots})
    order = [*matcher.order]
    for match in matches:
        if match.pattern.name in EXTENDED and len(match.roots) == 1:
            extent = Extent(view, canon, matcher, order, match)
            others = inside.setdefault(extent.root, [])
            if any(extent.inside <= other for other in others):
                continue
            if (found := extent.match()) is not None:
                others.append(extent.inside)
                yield found


class Extent:
    """The nodes of one extended match; order: all nodes of the graph."""

    def __init__(
        self, view: View, canon: Canon, matcher: Matcher, order: list[fx.Node], base: Match
    ):
        self.view, self.canon, self.matcher, self.base = view, canon, matcher, base
        self.order = order
        (self.root,) = base.roots
        self.shape = tuple(self.root.meta["val"].shape)
        read = {peel(canon.of[a]) for a in base.nodes_read}  # casts of arguments are not computed
        self.inside = {n for n in base.interior if peel(canon.of[n]) not in read} | {self.root}
        self.follow_readers()
        self.follow_arguments()

    def match(self) -> Match | None:
        try:
            translation = Translation(self.canon, self.inside, self.shape)
            program = translation.program(self.root)
            columns_of(program, {k: self.is_wide(a) for k, a in translation.arguments.items()})
        except (NoProgram, ValueError):
            return None
        given = dict.fromkeys(p.name for p in generated_rows.params) | translation.arguments
        dtype = str(self.root.meta["val"].dtype).removeprefix("torch.")
        given |= dict(program=str(program), dtype=dtype)
        roots, size = (self.canon.of[self.root],), len(program.statements)
        template = Template(generated_rows, ("generated",), roots, size, generated_rows.line)
        found = Match(generated_rows, template, [self.root], given, [])
        inside = self.matcher.between(found)
        if isinstance(inside, str) or self.matcher.outcomes.disagreement(found):
            return None
        found.interior = sorted(inside, key=self.matcher.order.__getitem__)
        return found

    def follow_readers(self) -> None:
        """Add what reads the result, up to the last node behind which nothing else of it is
        read.
        """
        first = self.matcher.order[self.root]
        added, stays = {self.root}, set()
        ahead = {*self.users(self.root)}  # readers of what was added
        end, until_there = self.root, set()
        for n in self.order[first + 1 : first + FAR]:
            if not ahead or len(added) > MOST_NODES:
                break
            read = {*n.all_input_nodes}
            if n not in ahead and read.isdisjoint(stays):
                continue
            ahead.discard(n)
            if read.isdisjoint(stays) and self.is_elementwise(n) and self.is_whole(n):
                added.add(n)
                ahead |= {*self.users(n)}
                if all(u in added for a in added if a is not n for u in self.users(a)):
                    end, until_there = n, {*added}
            else:
                stays.add(n)
        self.root = end
        self.inside |= until_there

    def users(self, n: fx.Node) -> list[fx.Node]:
        return [u for u in n.users if u not in self.inside]

    def follow_arguments(self) -> None:
        """Add what computes the arguments and is read by nothing else."""
        pending = [*self.inside]
        room = MOST_NODES
        while pending and room:
            for a in pending.pop().all_input_nodes:
                alone = a not in self.inside and self.inside.issuperset(a.users)
                if not alone or not self.is_elementwise(a) or self.keeps_its_value(a):
                    continue
                if fits(a.meta["val"].shape, self.shape):
                    self.inside.add(a)
                    pending.append(a)
                    room -= 1

    def is_wide(self, n: fx.Node) -> bool:
        """Is it known to have an element for each of a row's?"""
        return same(n.meta["val"].shape[-1:], self.shape[-1:])

    def keeps_its_value(self, n: fx.Node) -> bool:
        """Has it the value of what it reads, casts aside?"""
        return any(peel(self.canon.of[a]) is peel(self.canon.of[n]) for a in n.all_input_nodes)

    def is_whole(self, n: fx.Node) -> bool:
        """Has it the shape of the result?"""
        return same(n.meta["val"].shape, self.shape)

    def is_elementwise(self, n: fx.Node) -> bool:
        """Is it computed from what it reads by elementwise operations of a program? Not in fp16, in
        which a value between may become infinite.
        """
        value = n.meta.get("val")
        if not is_lowered(n) or is_mutation(n) or not isinstance(value, torch.Tensor):
            return False
        state = self.view.region.get
        plain = value.is_floating_point() and value.dtype != torch.float16
        if not plain or state(n) != state(self.base.roots[0]):
            return False
        read = {peel(self.canon.of[a]) for a in n.all_input_nodes}
        # a program passes no gradient at a bound
        edges = name_of(n) in STRICT or not self.view.trains(n)
        return self.reaches(peel(self.canon.of[n]), read, edges)

    def reaches(self, e: Expr, read: set[Expr], edges: bool) -> bool:
        """Do operations of a program lead from these values to this one? A root would have the
        gradient of a length. edges: may a minimum or a maximum be among them?
        """
        if e in read or e.op == "const":
            return True
        if not step(e) or e.op in ACROSS or e.op == "sqrt":
            return False
        if e.op in ("maximum", "minimum") and not edges:
            return False
        return all(self.reaches(peel(p), read, edges) for p in e.args)
