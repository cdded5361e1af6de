"""May the graph be changed at a site? Each check returns "" or the reason why not."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable

import torch
from torch import fx

from fusion_backend.capture.aliases import may_alias, storages
from fusion_backend.capture.view import is_lowered, is_mutation, name_of
from fusion_backend.compat.torch import (
    LINEAR,
    FakeTensor,
    pytree,
    schema_of,
    statically_known_true,
)
from fusion_backend.decide.facts import Facts
from fusion_backend.ir.argument_views import OF_COMPLEX, Viewed, original
from fusion_backend.ir.edges import bounded, is_strict
from fusion_backend.ir.expr import FREE, LIKE, Expr, peel
from fusion_backend.match.matcher import Match
from fusion_backend.match.templates import variables
from fusion_backend.ops.op import Op
from fusion_backend.reporting.places import location

HALVES = {torch.bfloat16, torch.float16}
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
# What chunk returns is several views of its argument.
COST_NOTHING = {*FREE, "tuple"}
# Views with another size or dtype than their base.
OF_PART = ("half", "slice", *OF_COMPLEX)
NEARBY = 200  # values to look at between results and arguments


class Legality:
    """The checks in one graph."""

    def __init__(self, facts: Facts):
        self.facts, self.canon, self.order = facts, facts.canon, facts.order

    @functools.cached_property
    def differentiated(self) -> set[fx.Node]:
        """The nodes from which a gradient may be asked for."""
        found: set[fx.Node] = set()
        writers = set().union(*self.facts.writers.values())
        for n in reversed(self.order):
            effect = n.op == "output" or is_mutation(n) or n in writers
            if effect or any(u in found and self.passes_gradient(u) for u in n.users):
                found.add(n)
        return found

    def passes_gradient(self, n: fx.Node) -> bool:
        """May a node give its arguments a gradient?"""
        if n.op == "output" or not is_lowered(n):
            return True
        value = n.meta.get("val")
        number = isinstance(value, torch.Tensor) and not (
            value.is_floating_point() or value.is_complex()
        )
        no_grad = not self.facts.view.region.get(n, (True,))[0]
        return not number and not no_grad and name_of(n) != "aten::detach"

    def refusal(self, match: Match) -> str:
        """Why the site may not be replaced, by whatever call; "" if it may."""
        return (
            self.computed_again(match)
            or self.not_movable(match)
            or self.without_gradient(match)
            or self.another_gradient(match)
            or not_supported(match)
        )

    def computed_again(self, match: Match) -> str:
        """Is an argument read only to compute another one, which the graph computes as well?
        silu(norm(x)) is norm(x) · sigmoid(norm(x)), but no norm of x whose gate is norm(x).
        """
        of = self.canon.of
        given = {id(peel(of[n])): n for n in match.nodes_read}
        read = reached([of[r] for r in match.roots], {*given})
        unread = given.keys() - read
        if len(read) == NEARBY:  # and there may be more
            return ""
        for n in (given[i] for i in given.keys() & read if unread):
            if unread & reached(peel(of[n]).args, unread):
                return f"its argument, {result(n)} at {location(n)}, would be computed again"
        return ""

    def computed(self, match: Match) -> list[fx.Node]:
        """The nodes that compute a new value inside. Casts of an argument do not, nor nodes that
        equal a result, such as a dropout in evaluation. The complement of a mask does not count
        either, because several layers may share it: the replacement reads the mask, if it reads
        any.
        """
        of = self.canon.of
        given = {id(peel(of[n])) for n in match.nodes_read}
        again = {id(of[r]) for r in match.roots}
        return [
            n
            for n in match.interior
            if id(of[n]) not in again and id(peel(of[n])) not in given and of[n].op != "not"
        ]

    def costly(self, match: Match) -> list[fx.Node]:
        """The nodes that no other site may compute as well: the results, and the nodes computed
        inside except views.
        """
        inside = (n for n in self.computed(match) if self.canon.of[n].op not in FREE)
        return [*match.roots, *inside]

    def unread(self, match: Match) -> tuple[int, ...]:
        """The places of the results that nobody reads: neither the code outside, nor nodes of the
        inside that stay in the graph, such as a cast of a result that is read outside.
        """
        inside, of = {*match.interior, *match.roots}, self.canon.of
        results = {id(of[r]) for r in match.roots}
        read: set[int] = set()
        stays: set[fx.Node] = set()
        for n in sorted(inside, reverse=True):
            if any(u not in inside or u in stays for u in n.users):
                if id(of[n]) in results:  # the result replaces every node with its value
                    read.add(id(of[n]))
                else:
                    stays.add(n)
        return tuple(i for i, r in enumerate(match.roots) if id(of[r]) not in read)

    def narrow(self, match: Match) -> str:
        """The 16-bit dtype to which everything that reads the first result, in fp32, casts it; ""
        if there is none. The code may compute the value twice: another site that reads it may read
        either.

        Backward adds the gradients of all readers up before they are rounded, which in fp16 may be
        too large: there is one reader then, and no reader of an expanded value.
        """
        root, of = match.roots[0], self.canon.of
        if root.meta["val"].dtype != torch.float32:
            return ""
        pending, inside, casts = [*of[root].nodes], {*match.interior}, []
        for n in pending:
            for u in (u for u in n.users if u not in inside):
                op = of[u].op if is_lowered(u) and not is_mutation(u) else None
                if op == "cast":
                    casts.append(u.meta["val"].dtype)
                elif op in FREE and op != "expand":
                    pending.append(u)
                else:
                    return ""
        found = {*casts}
        several = len(casts) > 1 and torch.float16 in found and self.facts.training(match)
        one = len(found) == 1 and found < HALVES and not several
        return str(casts[0]).removeprefix("torch.") if one else ""

    def without_gradient(self, match: Match) -> str:
        """Has one of several results no gradient? Tensors that only this result depends on have
        none either, in eager; as arguments of one op they would get zeros, and an optimizer would
        change them. A result is fine whose arguments are all read by results with a gradient.
        """
        if len(match.roots) < 2 or not self.facts.training(match):
            return ""
        reads = [variables(r) for r in match.template.roots]
        wanted = [
            not self.differentiated.isdisjoint((r, *self.canon.of[r].nodes)) for r in match.roots
        ]
        elsewhere = set().union(*itertools.compress(reads, wanted))
        for r, names, asked in zip(match.roots, reads, wanted, strict=True):
            if not asked and not names <= elsewhere:
                return f"nobody asks for a gradient of {result(r)}"
            if not any(map(self.facts.view.trains, (r, *self.canon.of[r].nodes))):
                return f"{result(r)} requires no gradient, unlike the other results"
        return ""

    def another_gradient(self, match: Match) -> str:
        """Has an operator inside, such as clamp, another gradient at its bound than that of the
        pattern, such as relu?
        """
        strict = match.pattern.memo.get("strict", set())
        if len(strict) != 1:
            return ""
        for n in bounded((*match.interior, *match.roots), self.canon.of):
            if is_strict(n) not in strict and self.facts.view.trains(n):
                passes = "no gradient" if is_strict(n) else "a gradient"
                told = f"{name_of(n).removeprefix('aten::')} at {location(n)} passes {passes}"
                return f"at its bound {told}, unlike the operator of the pattern"
        return ""

    def not_movable(self, match: Match) -> str:
        inside = {*match.interior, *match.roots}
        arguments = match.nodes_read
        names = {self.canon.of[a] for a in arguments if not a.meta["val"].is_floating_point()}
        stateful = [n for n in inside if n.op == "call_function" and self.canon.of[n] not in names]
        if self.crosses_state(stateful):  # a mask may come from any region: it has no gradient
            return "it crosses a change of grad mode, autocast or other state"
        results = {self.canon.of[r] for r in match.roots}
        for n in self.computed(match):
            if self.canon.of[n].op in COST_NOTHING:
                continue
            for u, v in self.readers(n, inside, results):
                if (u.users or u.target is not operator.getitem) and not reads_only_kind(u, v):
                    return f"{result(n)} inside it is used elsewhere too, at {location(u)}"
            for m in self.canon.of[n].nodes:
                if m not in inside and m.users and not inside.issuperset(m.users):
                    return f"{result(n)} inside it is used elsewhere too, at {location(m)}"
        first = min(match.roots)
        first_root = self.order[first]
        for a in arguments:
            if self.order[a] > first_root:
                told = f"its argument, {result(a)} at {location(a)}"
                return f"{told}, is computed after its first result"
        for n in (n for n in match.interior if self.canon.of[n] in results):
            for u in n.users:
                if u not in inside and self.order[u] < first_root:
                    told = f"{result(n)} inside it is read at {location(u)}"
                    return f"{told}, before {result(first)} is computed"
        return self.changed(match, arguments) if self.facts.writers else ""

    def readers(self, n: fx.Node, inside: set[fx.Node], results: set) -> list[tuple]:
        """What reads a value outside, itself or through views and casts that stay for it: pairs of
        the reader and what it reads.
        """
        found, pending = [], [n]
        for v in pending:
            for u in v.users:
                if u not in inside:
                    found.append((u, v))
                elif self.canon.of[u].op in COST_NOTHING and self.canon.of[u] not in results:
                    pending.append(u)
        return found

    def changed(self, match: Match, arguments: list[fx.Node]) -> str:
        """Does something write to a value that the match reads, keeps or computes?"""
        inside = {*match.interior, *match.roots}
        for m in (m for m in sorted(inside) if is_mutation(m)):
            if told := self.overwritten_for_others(m, inside):
                return told
        held = set().union(*map(storages, arguments))
        within = set().union(*map(storages, match.interior)) - held
        results = set().union(*map(storages, match.roots)) - held - within
        first = min(self.order[n] for n in (*match.interior, *match.roots))
        last_root = max(self.order[r] for r in match.roots)
        for m in (m for storage in within for m in self.facts.writers.get(storage, ())):
            if self.order[m] > first and m not in inside:  # a view of it, say, that is the result
                return f"a value inside it is written to, at {location(m)}"
        for m in (m for storage in results for m in self.facts.writers.get(storage, ())):
            if self.order[m] < last_root and m not in inside:
                return f"a result is written to before the last one is computed, at {location(m)}"
        for storage in held | results:
            writers = self.facts.writers.get(storage, ())
            read = writers and storage in held
            begin = self.first_read(match, storage, first) if read else last_root
            for m in (m for m in writers if m not in inside):
                if begin < self.order[m] < last_root:
                    return f"an argument may be written to in between, at {location(m)}"
                # the op keeps its arguments for the backward; plain autograd may keep only values
                # that were computed from them
                later = self.order[m] > last_root and overwrites(m, storage)
                result_is_read = isinstance(match.pattern, Op) and match.pattern.backward_result
                kept = storage in held or result_is_read
                if later and kept and self.facts.training(match):
                    what = "an argument" if storage in held else "a result"
                    where = location(m)
                    return f"{what} that the backward reads is written to afterwards, at {where}"
        return ""

    def overwritten_for_others(self, m: fx.Node, inside: set[fx.Node]) -> str:
        """Would a reader miss the write of this node if the site were replaced? The node may
        overwrite a value that this graph has made and that nobody outside the site reads
        afterwards.
        """
        written = storages(m)  # in place or out=: the result is what was written to
        alike = [n for n in self.order if not written.isdisjoint(storages(n))]
        made = alike[0]
        fresh = made.target is LINEAR or (is_lowered(made) and not may_alias(made))
        if not fresh or made is m:
            return f"it writes to memory that this graph has not made, at {location(m)}"
        for u in (u for n in alike for u in n.users):
            if u not in inside and self.order[u] > self.order[m]:
                return f"the memory that it writes to is read elsewhere too, at {location(u)}"
        return ""

    def written_to(self, results: list[fx.Node]) -> bool:
        """Does an operator write to a result of the site? Unknown calls, such as one that makes a
        DTensor of the result, are assumed not to.
        """
        held = set().union(*map(storages, results))
        return any(overwrites(m, s) for s in held for m in self.facts.writers.get(s, ()))

    def first_read(self, match: Match, storage: int, first: int) -> int:
        """Where the match, or the op that replaces it, first reads a storage. `first` if no node of
        the match reads it: an argument may be another node with the same value.
        """
        nodes = (*match.interior, *match.roots)
        reads = [
            self.order[n] for n in nodes if any(storage in storages(a) for a in n.all_input_nodes)
        ]
        return min(*reads, *(self.order[r] for r in match.roots)) if reads else first

    def crosses_state(self, nodes: list[fx.Node]) -> bool:
        """Do the nodes differ in grad mode, autocast or other state? Casts may differ in autocast,
        which does not change them, but not in grad mode.
        """
        of, regions = self.canon.of, {n: self.facts.view.region.get(n) for n in nodes}
        casts = {n for n in nodes if any(peel(of[a]) is peel(of[n]) for a in n.all_input_nodes)}
        whole = {r for n, r in regions.items() if n not in casts}
        without_autocast = {r and (r[0], r[1], r[3]) for r in regions.values()}
        return len(whole) > 1 or len(without_autocast) > 1


def reached(roots: Iterable[Expr], stops: set[int]) -> set[int]:
    """The identities of the values that these are computed from, casts aside: not further than
    `stops`, and NEARBY of them at most.
    """
    found, pending = set(), [*map(peel, roots)]
    while pending and len(found) < NEARBY:
        e = pending.pop()
        if id(e) not in found:
            found.add(id(e))
            pending += [] if id(e) in stops else map(peel, e.args)
    return found


def not_supported(match: Match) -> str:
    """Why the arguments are not supported: they must be ordinary float tensors on one device, or of
    the dtype that the reference has there.
    """
    for name, node in match.tensors.items():
        v = original(node)
        if isinstance(node, Viewed) and any(step in OF_PART for step, _ in node.steps):
            v = node.value
        if type(v) is not FakeTensor:
            return f"{name} is a {type(v).__name__}"
        if v.layout != torch.strided or v.is_quantized:
            return f"{name} is {'quantized' if v.is_quantized else v.layout}"
        exact = match.pattern.memo.get("dtypes", {}).get(name)
        if v.dtype not in FLOATS if exact is None else v.dtype != exact:
            wanted = (
                "float32, bfloat16 and float16"
                if exact is None
                else str(exact).removeprefix("torch.")
            )
            return f"{name} is {str(v.dtype).removeprefix('torch.')}; kernels take {wanted}"
        if statically_known_true(v.numel() == 0):
            return f"{name} is empty"
    devices = {v.device for v in map(original, match.tensors.values()) if v.dim()}
    if len(devices) > 1:
        return f"arguments on {' and '.join(sorted(map(str, devices)))}"
    return ""


def overwrites(m: fx.Node, storage: int) -> bool:
    """Does this node certainly write to the storage? `x[i] = y` does, although it is copied
    verbatim; unknown calls are assumed not to.
    """
    if m.target is operator.setitem:
        written = [m.args[0]]
    elif is_lowered(m):
        given = dict(enumerate(m.args)) | m.kwargs
        arguments = enumerate(schema_of(m.target).arguments)
        writes = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
        written = [given[k] for place in writes for k in place if k in given]
    else:
        written = []
    nodes = (n for n in pytree.tree_leaves(written) if isinstance(n, fx.Node))
    return any(storage in storages(n) for n in nodes)


def result(n: fx.Node) -> str:
    """The result of a node, in words."""
    return f"the result of {name_of(n).removeprefix('aten::')}"


def reads_only_kind(user: fx.Node, n: fx.Node) -> bool:
    """Is it the y of x.type_as(y) or its like?"""
    return user.target in LIKE and n is not user.args[0]
