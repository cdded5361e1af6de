"""Pattern x node -> Match or Mismatch.

A template is tried where it can start (index.py), fits (fitting.py) and can be unified (unify.py)
with the canonical expression. Then the dtypes and shapes of the outputs must agree with the graph.
Whatever the expressions say, the walk over the real nodes has the last word on what is inside a
match.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.compat.torch import FakeTensor, FakeTensorMode, enable_python_dispatcher, hinted
from fusion_backend.ir.argument_views import BY_NUMBERS, Viewed, geometry, original, value_of
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import FREE, LIKE, Expr, peel
from fusion_backend.match.prefilter import Fitting, expected
from fusion_backend.match.root_index import Below
from fusion_backend.match.templates import Template, templates
from fusion_backend.match.unify import Bound, Unifier
from fusion_backend.ops.rule import Rule
from fusion_backend.reporting.faults import refusal
from fusion_backend.reporting.report import RuleCount

REMEMBERED = 1000  # shapes a pattern
# nodes to look at for each operator of a template, for a result that is not inside another
NEAR = 50


@dataclasses.dataclass
class Match:
    """A place where a pattern stands in a view."""

    pattern: Rule
    template: Template
    roots: list[fx.Node]  # the nodes whose values the pattern computes
    arguments: dict[str, object]  # argument -> node, Viewed, number or None
    interior: list[fx.Node]  # nodes between arguments and roots, in graph order

    @functools.cached_property
    def tensors(self) -> dict[str, fx.Node | Viewed]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, (fx.Node, Viewed))}

    def bytes_inside(self, canon: Canon) -> int | None:
        """What eager writes and reads again for values inside the match; None when a size is
        symbolic.
        """
        total = 0
        for n in self.interior:
            v = n.meta["val"]
            if (
                not isinstance(v, torch.Tensor)
                or canon.of[n].op in FREE
                or peel(canon.of[n]).op in FREE
            ):
                continue
            if not isinstance(v.numel(), int):
                return None
            total += 2 * v.numel() * v.element_size()
        return total


@dataclasses.dataclass
class Mismatch:
    """Where matching stopped: `matched` of `size` operators agreed, then `reason` at `node`."""

    pattern: Rule
    root: fx.Node
    matched: int
    size: int
    node: fx.Node
    reason: str
    gave_up: bool = False  # the rest was not looked at

    @property
    def rank(self) -> tuple[bool, int]:
        """What is told where there is more than one at a place."""
        return self.gave_up, self.matched


class Matcher:
    """All patterns against one view."""

    def __init__(self, graph: fx.Graph, canon: Canon, patterns: list[Rule]):
        self.canon = canon
        self.patterns = patterns
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.inputs = {n: n.all_input_nodes for n in graph.nodes}
        # what a node computes, but for a rounding
        self.value = {n: peel(e) for n, e in canon.of.items()}
        below = Below()
        # Root operator -> what stands below -> nodes: layers are alike, so there are few groups.
        self.alike: dict[str, dict[frozenset, list[fx.Node]]] = {}
        self.by_value: dict[Expr, list[fx.Node]] = {}
        for n, e in canon.of.items():
            # the same value under another name
            again = any(canon.of[a] is e for a in self.inputs[n])
            if (
                n.op == "call_function"
                and isinstance(n.meta.get("val"), torch.Tensor)
                and not again
            ):
                alike = self.alike.setdefault(self.value[n].op, {})
                alike.setdefault(below(self.value[n]), []).append(n)
                self.by_value.setdefault(self.value[n], []).append(n)
        self.fitting = Fitting()
        self.outcomes: dict[Rule, dict[tuple, list[tuple] | str]] = {}
        self.signatures: dict[fx.Node, tuple | None] = {}
        self.started: dict[tuple, list[fx.Node]] = {}
        self.misses: dict[tuple[str, fx.Node], Mismatch] = {}
        self.stands: dict[fx.Node, list[Template]] = {}  # the templates that were found there
        self.faults: dict[fx.Node, str] = {}  # a node where matching failed -> how
        self.counts: dict[str, RuleCount] = {}

    def starts(self, t: Template) -> list[fx.Node]:
        """The nodes where a template can start, the latest first."""
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
        """Matches, the largest templates first, the latest nodes first. Overlaps are for the caller
        to refuse.
        """
        ranked = sorted((t for p in self.patterns for t in templates(p)), key=lambda t: -t.size)
        for t in ranked:
            started, found = time.perf_counter(), []
            starts = self.starts(t)
            for n in starts:
                match = self.attempt(t, n)
                if match is not None:
                    self.stands.setdefault(n, []).append(t)
                    found.append(match)
            count = RuleCount(len(starts), len(found), time.perf_counter() - started)
            name = t.pattern.name
            self.counts[name] = self.counts[name].plus(count) if name in self.counts else count
            yield from found

    def attempt(self, t: Template, n: fx.Node) -> Match | None:
        """A template at a node. Where that raises, this node alone is a miss."""
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
        matched, stopped = self.fitting(t.forms[root], e)
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
        """Does the pattern stand there in another form, or a larger one, where nothing but a node
        was lacking?
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
        for n in reversed(nodes):  # of nodes with one value the last is what others read
            if n not in roots:
                for found in unifier.unify(p, self.canon.of[n], env):
                    yield from self.other_roots(t, unifier, [*roots[:i], n, *roots[i + 1 :]], found)

    def around(self, env: dict, t: Template, p: Expr) -> list[fx.Node]:
        """Nodes that p fits among the users, and theirs, of the argument that is used least."""
        held = [b.expr for b in env.values() if isinstance(b, Bound)]
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
            if n in self.value and not self.fitting(t.forms[p], self.value[n]).stopped
        ]
        return sorted(found, key=self.order.__getitem__)

    def complete(self, t: Template, roots: list[fx.Node], env: dict) -> Match | tuple[fx.Node, str]:
        """Bound expressions -> nodes, in dtypes that reproduce the graph's outputs; then the nodes
        in between.
        """
        for name, bound in env.items():
            if isinstance(bound, Bound) and peel(bound.expr) in env:
                return roots[
                    0
                ], f"argument {name} is a value inside it, which would be computed again"
        why = (roots[0], "")
        for peeled, through in ((True, False), (True, True), (False, False), (False, True)):
            arguments = held(t, env, peeled, through)
            if isinstance(arguments, str):
                why = why if why[1] else (roots[0], arguments)
                continue
            found = Match(t.pattern, t, roots, arguments, [])
            reason = mixed(env, arguments) if peeled else ""
            reason = reason or self.disagreement(found)
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

    def disagreement(self, match: Match) -> str:
        """Why the reference on these arguments is not what the graph computes there; empty when it
        is.

        What the reference gives is remembered: the layers of a model ask the same again and again,
        and so do graphs. Symbolic sizes are asked about as they are in the example: reasoning with
        symbols costs ten times more, and the gate runs the op on the symbols of what it accepts.
        """
        arguments = [match.arguments[p.name] for p in match.pattern.params]
        signatures = [self.signature(a) for a in arguments]
        exact = None in signatures  # some size is known at run time only
        form = (match.template.kinds, torch.get_default_dtype())
        key = (*form, *((geometry(value_of(a)) for a in arguments) if exact else signatures))
        known = (
            self.outcomes.setdefault(match.pattern, {})
            if exact
            else match.pattern.memo.setdefault("outcomes", {})
        )
        if key not in known:
            if len(known) > REMEMBERED:
                known.clear()
            values = list(map(value_of, arguments))
            if not exact and not all(map(static, values)):
                with FakeTensorMode():
                    values = [as_in_example(v) for v in values]
            known[key] = outcome(match.pattern, values)
        outs = known[key]
        if isinstance(outs, str):
            return f"the reference refuses these arguments: {outs}"
        for (dtype, device, shape), root in zip(outs, match.roots, strict=True):
            want = root.meta["val"]
            if dtype != want.dtype:
                return f"the result is {want.dtype}, the pattern gives {dtype}"
            if device != want.device or not same(
                shape, want.shape if exact else hinted(want.shape)
            ):
                return f"the result is {tuple(want.shape)}, the pattern gives {shape}"
        return ""

    def signature(self, argument):
        """What a shape rule can see of an argument, sizes as in the example; None where that is not
        known.
        """
        if isinstance(argument, Viewed):
            of = self.signature(argument.node)
            return None if of is None else (argument.kinds, of)
        if not isinstance(argument, fx.Node):
            return "none" if argument is None else argument
        if argument not in self.signatures:
            v = argument.meta["val"]
            shape, stride = hinted(v.shape), hinted(v.stride())
            plain = type(v) is FakeTensor and shape is not None and stride is not None
            self.signatures[argument] = (v.dtype, v.device, shape, stride) if plain else None
        return self.signatures[argument]

    def between(self, match: Match) -> set[fx.Node] | str:
        """The nodes inside; a sentence when the match reads something that is not among its
        arguments.
        """
        stops = {v.node if isinstance(v, Viewed) else v for v in match.tensors.values()}
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


def static(value) -> bool:
    return not isinstance(value, torch.Tensor) or all(
        type(size) is int for size in (*value.shape, *value.stride())
    )


def as_in_example(value):
    """A fake of the sizes that a symbolic one has in the example; anything but a tensor
    as it is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    sizes = hinted(value.shape), hinted(value.stride())
    return torch.empty_strided(*sizes, dtype=value.dtype, device=value.device)


def holds_tensors(n: fx.Node) -> bool:
    """Sizes and numbers are no values of a match; a tensor or several, as of chunk, are."""
    value = n.meta.get("val")
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and len(value) > 0


def mixed(env: dict, arguments: dict) -> str:
    """Without its cast, would an argument reach a matrix product whose other operand keeps its
    dtype?
    """
    bounds = {name: b for name, b in env.items() if isinstance(b, Bound)}
    kept = {original(arguments[name]).dtype for name, b in bounds.items() if b.pinned}
    uncast = {
        original(arguments[name]).dtype
        for name, b in bounds.items()
        if not b.pinned and b.expr.op == "cast"
    }
    return "a matrix product would get two dtypes" if kept and uncast - kept else ""


def held(t: Template, env: dict, peeled: bool, through: bool) -> dict[str, object] | str:
    """The arguments as nodes and numbers; a sentence where no node holds one."""
    arguments: dict[str, object] = {}
    for p, kind in zip(t.pattern.params, t.kinds, strict=True):
        if kind != "tensor":
            word = kind.removeprefix("=") if p.words else None
            arguments[p.name] = word if p.words or kind == "none" else p.scalar(env[p.name])
            continue
        arguments[p.name] = holder(env[p.name], peeled, through)
        if arguments[p.name] is None:
            return (
                f"argument {p.name} is computed inside one operator: no node of the graph holds it"
            )
    return arguments


def holder(bound: Bound, peeled: bool, through: bool = False) -> fx.Node | Viewed | None:
    """The first node with the bound value; before rounding casts where they do not matter.

    `through` a permutation that the user has made, but not for this site: a linear layer reads the
    weight itself.
    """
    e = peel(bound.expr) if peeled and not bound.pinned else bound.expr
    through = through and e.op == "permute" and bool(e.args[0].nodes)
    if e.nodes and not through:
        return e.nodes[0]
    if e.written is not None and e.written.nodes:
        return e.written.nodes[0]
    steps: list[tuple[str, tuple]] = []
    while e.op in ("permute", "half", "slice", "not", *BY_NUMBERS) and (through or not e.nodes):
        through = False
        number = next((a for a in e.args if a.of_run_time), None)
        steps.insert(0, (e.op, (number.nodes[0],) if number else e.attr or ()))
        if e.op in BY_NUMBERS and (number is None or (e.op == "div" and e.args[0] is number)):
            return None
        e = next(a for a in e.args if a is not number)
    if not e.nodes and e.rows is not None:
        steps.insert(0, ("unflatten", e.shape[:-1]))
        e = e.rows
    plain = all(isinstance(v, (int, fx.Node)) for _, attr in steps for v in attr)
    return Viewed(e.nodes[0], tuple(steps)) if e.nodes and plain else None


def outcome(pattern: Rule, values: list) -> list[tuple] | str:
    """Dtype, device and shape of what the reference gives on these fakes, or its error."""
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    try:
        with (
            modes[0] if modes else contextlib.nullcontext(),
            torch.no_grad(),
            enable_python_dispatcher(),
        ):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                # the dispatcher: torch 2.11, a 3-D matmul of symbolic sizes
                outs = pattern.reference(*values)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [
        (o.dtype, o.device, tuple(o.shape)) for o in (outs if isinstance(outs, tuple) else (outs,))
    ]
