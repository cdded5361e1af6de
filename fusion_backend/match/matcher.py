"""Pattern x node -> Match or Mismatch.

A template is tried where it can start (root_index.py), fits (prefilter.py) and can be unified with
the canonical expression (unify.py). Then the dtypes and shapes of the outputs must agree with the
graph (outcomes.py). Finally a walk over the real nodes decides what is inside a match, whatever the
expressions say.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.attention import MARK
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import LIKE, LOOKED_THROUGH, Expr, peel
from fusion_backend.match.arguments import (
    arguments_of,
    mixed,
    unchanged,
    unwidened,
    ways_to_read,
    without_upcasts,
)
from fusion_backend.match.match import Match, Mismatch
from fusion_backend.match.outcomes import Outcomes
from fusion_backend.match.prefilter import Fitting, expected
from fusion_backend.match.root_index import Below
from fusion_backend.match.templates import Template, templates, variables
from fusion_backend.match.unify import Bound, Unifier
from fusion_backend.ops.rule import Rule
from fusion_backend.reporting.faults import refusal
from fusion_backend.reporting.records import RuleCount

# nodes to look at, for each operator of a template, for a result that is not inside another one
NEAR = 50
MOST_READINGS = 4  # of a template at a node, in case the first one may not be replaced


class Matcher:
    """All patterns against one view."""

    def __init__(self, graph: fx.Graph, canon: Canon, patterns: list[Rule]):
        self.canon = canon
        self.patterns = patterns
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.inputs = {n: n.all_input_nodes for n in graph.nodes}
        # the expression of a node, without a final rounding
        self.value = {n: peel(e) for n, e in canon.of.items()}
        below = Below()
        # Root operator -> what stands below -> nodes: layers are alike, so there are few groups.
        self.alike: dict[str, dict[frozenset, list[fx.Node]]] = {}
        self.by_value: dict[Expr, list[fx.Node]] = {}
        for n, e in canon.of.items():
            again = MARK in n.meta or (e.nodes[0] is not n and self.named_again(n, e))
            again = again or unwidened(e) is not e  # the narrow value is the one to write
            if (
                n.op == "call_function"
                and isinstance(n.meta.get("val"), torch.Tensor)
                and not again
            ):
                alike = self.alike.setdefault(self.value[n].op, {})
                alike.setdefault(below(self.value[n]), []).append(n)
                self.by_value.setdefault(self.value[n], []).append(n)
        self.fitting = Fitting()
        self.outcomes = Outcomes()
        self.started: dict[tuple, list[fx.Node]] = {}
        self.misses: dict[tuple[str, fx.Node], Mismatch] = {}
        self.stands: dict[fx.Node, list[Template]] = {}  # the templates that were found there
        self.taken: dict[str, set[fx.Node]] = {}  # the results that matches of a pattern have
        self.faults: dict[fx.Node, str] = {}  # a node where matching failed -> how
        self.counts: dict[str, RuleCount] = {}

    def named_again(self, n: fx.Node, e: Expr) -> bool:
        """Is the node a name, or a copy, of what it is computed from? Of views that undo each
        other, as in y.t().t(), the last one may be a result: it is y, in the same memory.
        """
        above, memory = {*self.inputs[n]}, storages(n)
        for distance in range(LOOKED_THROUGH):
            equal = [a for a in above if self.canon.of[a] is e]
            if any(distance == 0 or memory.isdisjoint(storages(a)) for a in equal):
                return True
            above = {b for a in above for b in self.inputs[a]}
        return False

    def starts(self, t: Template) -> list[fx.Node]:
        """The nodes where a template can start, the last one first."""
        root = t.roots[t.start]
        # x / c for x · s
        either = root.op in ("mul", "div") and any(a.op == "scalar" for a in root.args)
        key = (root.op, either, t.needs)
        if key not in self.started:
            groups = [
                g
                for op in (("mul", "div") if either else (root.op,))
                for g in self.alike.get(op, {}).items()
            ]
            nodes = [n for below, alike in groups if t.needs <= below for n in alike]
            self.started[key] = sorted(nodes, key=self.order.__getitem__, reverse=True)
        return self.started[key]

    def candidates(self) -> Iterator[Match]:
        """Matches, the largest templates and the last nodes first. The caller refuses overlaps."""
        ranked = sorted((t for p in self.patterns for t in templates(p)), key=lambda t: -t.size)
        for t in ranked:
            started, found = time.perf_counter(), []
            starts = self.starts(t)
            for n in starts:
                match = self.attempt(t, n)
                if match is not None:
                    self.stands.setdefault(n, []).append(t)
                    found.append(match)
                    self.taken.setdefault(t.pattern.name, set()).update(match.roots)
            count = RuleCount(len(starts), len(found), time.perf_counter() - started)
            name = t.pattern.name
            self.counts[name] = self.counts[name].plus(count) if name in self.counts else count
            yield from found

    def attempt(self, t: Template, n: fx.Node) -> Match | None:
        """Match a template at a node. If that raises, only this node is a miss."""
        try:
            return self.at(t, n)
        except Exception as error:
            reason, fault = refusal(error, "matching it")
            if fault is not None:
                self.faults[n] = f"{t.pattern.where}: {fault}"
            self.note(t, n, t.size, None, reason)
            return None

    def at(self, t: Template, n: fx.Node) -> Match | None:
        root, e = t.roots[t.start], self.canon.of[n]
        matched, stopped = self.fitting(t.skeletons[root], e)
        if stopped is not None:
            if 2 * matched.bit_count() >= t.size >= 3:
                self.note(t, n, matched.bit_count(), stopped[1], expected(*stopped))
            return None
        unifier = Unifier(t, self.fitting)
        where, reason = n, ""
        roots: list = [None] * len(t.roots)
        roots[t.start] = n
        for first in unifier.unify(root, e, {}):
            for found_roots, env in self.other_roots(t, unifier, roots, first):
                found = self.complete(t, found_roots, env)
                if isinstance(found, Match):
                    return found
                where, reason = found
                unifier.best = (t.size, None, reason)
        deepest, there, why = unifier.best
        if unifier.exhausted:
            self.note(t, n, max(deepest, 0), there, unifier.exhausted, where, gave_up=True)
        elif reason or 2 * deepest >= t.size >= 3:
            self.note(t, n, deepest, there, why or reason, where)
        return None

    def other_readings(self, match: Match) -> Iterator[Match]:
        """Other matches of the same template at the same node, in case this one may not be
        replaced: for example, either operand of dropout(a) + dropout(b).
        """
        t, start = match.template, match.template.start
        roots: list = [None] * len(t.roots)
        roots[start] = match.roots[start]
        unifier = Unifier(t, self.fitting)
        seen = {frozenset(match.tensors.items())}
        for first in unifier.unify(t.roots[start], self.canon.of[roots[start]], {}):
            for found_roots, env in self.other_roots(t, unifier, roots, first):
                found = self.complete(t, found_roots, env)
                key = frozenset(found.tensors.items()) if isinstance(found, Match) else None
                if key is None or key in seen:
                    continue
                yield found
                seen.add(key)
                if len(seen) > MOST_READINGS:
                    return

    def note(
        self,
        t: Template,
        root: fx.Node,
        matched: int,
        there: Expr | None,
        why: str,
        where=None,
        gave_up: bool = False,
    ) -> None:
        """Remember the deepest partial match of a pattern at a node."""
        key = (t.pattern.name, root)
        node = there.nodes[0] if there is not None and there.nodes else where or root
        miss = Mismatch(t.pattern, root, min(matched, t.size), t.size, node, why, gave_up)
        if key not in self.misses or miss.rank > self.misses[key].rank:
            self.misses[key] = miss

    def covered(self, miss: Mismatch) -> bool:
        """Does the pattern match there in another or a larger form, for which only a node was
        missing?
        """
        larger = (
            t.pattern is miss.pattern or t.size > miss.size for t in self.stands.get(miss.root, ())
        )
        return miss.matched == miss.size and not miss.gave_up and any(larger)

    def other_roots(self, t: Template, unifier: Unifier, roots: list, env: dict) -> Iterator[tuple]:
        """Nodes for the other results: values inside the match, or what its arguments
        are used for.
        """
        if None not in roots:
            yield roots, env
            return
        i = roots.index(None)
        p = t.roots[i]
        inside = next((g for g, q in env.items() if q is p), None)
        nodes = self.by_value.get(inside, ()) if inside is not None else self.around(env, t, p)
        # of nodes with one value the last is what others read; what another match has comes last
        taken = self.taken.get(t.pattern.name, ())
        for n in sorted(reversed(nodes), key=lambda n: n in taken):
            if n not in roots:
                for found in unifier.unify(p, self.canon.of[n], env):
                    yield from self.other_roots(t, unifier, [*roots[:i], n, *roots[i + 1 :]], found)

    def around(self, env: dict, t: Template, p: Expr) -> list[fx.Node]:
        """Nodes that p fits among the users, and their users, of the argument of p with the fewest
        users.
        """
        names = variables(p)
        held = [b.expr for name, b in env.items() if isinstance(b, Bound) and name in names]
        pending = min(([u for n in e.nodes for u in n.users] for e in held), key=len, default=[])
        seen: set[fx.Node] = set()
        while pending and len(seen) < NEAR * t.size:
            n = pending.pop(0)
            if n not in seen:
                seen.add(n)
                pending += n.users
        found = [
            n
            for n in seen
            if n in self.value and not self.fitting(t.skeletons[p], self.value[n]).stopped
        ]
        return sorted(found, key=self.order.__getitem__)

    def complete(self, t: Template, roots: list[fx.Node], env: dict) -> Match | tuple[fx.Node, str]:
        """Bound expressions -> nodes, with dtypes that reproduce the graph's outputs; then the
        nodes between arguments and results.
        """
        for name, bound in env.items():
            if isinstance(bound, Bound) and peel(bound.expr) in env:
                return roots[
                    0
                ], f"argument {name} is a value inside it, which would be computed again"
        why = (roots[0], "")
        forms = [env, uncast] if (uncast := without_upcasts(t, env)) else [env]
        ways = ((form, read) for form in forms for read in ways_to_read(form))
        for (form, read), through in itertools.product(ways, (False, True)):
            arguments = arguments_of(t, form, read, through)
            if isinstance(arguments, str):
                why = why if why[1] else (roots[0], arguments)
                continue
            found = Match(t.pattern, t, roots, arguments, [])
            reason = mixed(form, arguments) if read is not unchanged else ""
            reason = reason or self.outcomes.disagreement(found)
            if reason:
                why = (roots[0], reason)
                continue
            inside = self.between(found)
            if isinstance(inside, str):
                why = (roots[0], inside)
                continue
            found.interior = sorted(inside, key=self.order.__getitem__)
            return found
        return why

    def between(self, match: Match) -> set[fx.Node] | str:
        """The nodes inside; a sentence when the match reads something that is not among its
        arguments.
        """
        stops = {*match.nodes_read}
        bound = {self.value[s] for s in stops}
        inside: set[fx.Node] = set()
        stack = list(match.roots)
        while stack:
            n = stack.pop()
            for a in n.args[:1] if n.target in LIKE else self.inputs[n]:
                if a in stops or a in inside or a in match.roots or not holds_tensors(a):
                    continue
                value = self.value[a]
                alias = any(self.value[b] is value for b in self.inputs[a])
                if value in bound and not alias:
                    continue  # computed twice: the argument is the other one
                if a.op != "call_function" or (value.op == "input" and not alias):
                    return f"it reads {a.name}, which is not one of the arguments"
                inside.add(a)
                stack.append(a)
        return inside


def holds_tensors(n: fx.Node) -> bool:
    """Does a node hold one tensor or several, as chunk does, and not a size or a number?"""
    value = n.meta.get("val")
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and len(value) > 0
