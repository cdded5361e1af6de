"""Pattern x node -> Match or Mismatch.

Matching works on canonical expressions (canonical.py) with backtracking over the order of commutative operands. Casts
between fp32, bf16 and fp16 inside a match are looked through: a fused kernel computes in fp32 and rounds once per
output. The dtypes and shapes of the outputs must agree with the graph; the operands of a matrix product keep their
dtype. Whatever the expressions say, the walk over the real nodes has the last word on what is inside a match.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.canonical import Canon
from fusion_backend.expressions import COMMUTATIVE, Expr, describe
from fusion_backend.index import Below, flat, needs, peel
from fusion_backend.pattern import Pattern
from fusion_backend.template import FORMS, Template, templates
from fusion_backend.torch_api import FakeTensor, enable_python_dispatcher, guard_or_false, sym_eq
from fusion_backend.views import Viewed, seen, unpermuted, value_of

KEEPS_DTYPE = {"matmul", "linear"}  # a cast before these decides what is computed
OWN_ATTR = {"dropout", "repeat_heads"}  # a name that tells draws apart; how often, which the shapes say
BUDGET = 5_000  # unification steps for one template at one node


@dataclasses.dataclass
class Match:
    """A place where a pattern stands in a view."""

    pattern: Pattern
    template: Template
    roots: list[fx.Node]  # the nodes whose values the pattern computes
    arguments: dict[str, object]  # argument -> node, Viewed, number or None
    interior: list[fx.Node]  # nodes between arguments and roots, in graph order

    def tensors(self) -> dict[str, fx.Node | Viewed]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, (fx.Node, Viewed))}


@dataclasses.dataclass
class Mismatch:
    """Where matching stopped: `matched` of `size` operators agreed, then `reason` at `node`."""

    pattern: Pattern
    root: fx.Node
    matched: int
    size: int
    node: fx.Node
    reason: str


@dataclasses.dataclass(frozen=True)
class Bound:
    expr: Expr
    pinned: bool  # its dtype matters


class Unifier:
    """Match one template at one expression, remembering the deepest point that was reached."""

    def __init__(self, template: Template):
        self.reciprocal = template.pattern.reciprocal
        self.depth = 0
        self.steps = 0
        self.best: tuple[int, Expr | None, str] = (-1, None, "")

    def miss(self, g: Expr, reason: str) -> None:
        if self.depth > self.best[0]:
            self.best = (self.depth, g, reason)

    def unify(self, p: Expr, g: Expr, env: dict, pinned: bool = False) -> Iterator[dict]:
        self.steps += 1
        if self.steps > BUDGET:
            return
        if p.op == "var":
            yield from self.bind(p.attr, g, env, pinned)
        elif p.op == "scalar":
            yield from self.capture(p.attr, peel(g), env)
        elif p.op == "const":
            if g.op == "const" and math.isclose(p.attr, g.attr, rel_tol=1e-6):
                yield env
            else:
                self.miss(g, f"expected {p.attr:g}, found {describe(g)}")
        else:
            yield from self.operator(p, peel(g), env, pinned and p.op == "permute")

    def operator(self, p: Expr, g: Expr, env: dict, pinned: bool) -> Iterator[dict]:
        if p.op == "permute" and p.args[0].op == "var" and (p.op, p.attr) != (g.op, g.attr):
            yield from self.bind(p.args[0].attr, unpermuted(g, p.attr), env, pinned)
            return
        if p.op != g.op:
            found = list(self.as_reciprocal(p, g, env))
            if not found:
                self.miss(g, f"expected {p.op}, found {describe(g)}")
            yield from found
            return
        if (p.attr != g.attr and p.op not in OWN_ATTR) or len(p.args) != len(g.args):
            self.miss(g, f"expected {p.op} over {p.attr}, found {g.attr}")
            return
        if env.get(id(g), p) is not p:  # silu(x w) is no gated_linear(x, w, w), which would multiply twice
            self.miss(g, f"{describe(g)} would stand for two operators of the pattern")
            return
        env = {**env, id(g): p}
        self.depth += 1
        pinned = pinned or p.op in KEEPS_DTYPE
        for order in ((0, 1), (1, 0)) if p.op in COMMUTATIVE else (range(len(p.args)),):
            yield from self.all([(p.args[i], g.args[j]) for i, j in enumerate(order)], env, pinned)
        if p.op in ("add", "mul"):
            yield from self.chain(p, g, env)
        elif p.op == "where" and p.args[0].op == "var":
            mask, x, y = g.args
            complement = Expr("not", (mask,), None, mask.shape, -1)
            yield from self.all(list(zip(p.args, (complement, y, x), strict=True)), env, False)
        self.depth -= 1

    def all(self, pairs: list, env: dict, pinned: bool) -> Iterator[dict]:
        if not pairs:
            yield env
            return
        for found in self.unify(*pairs[0], env, pinned):
            yield from self.all(pairs[1:], found, pinned)

    def chain(self, p: Expr, g: Expr, env: dict) -> Iterator[dict]:
        """a·(b·c) against (a·b)·c: the operands of both chains in any order."""
        wanted, given = flat(p, p.op), flat(g, p.op)
        if not 2 < len(wanted) == len(given) <= 6:
            return
        wanted.sort(key=lambda e: e.op in ("var", "scalar"))  # what can fail fails first

        def assign(i: int, left: list[Expr], env: dict) -> Iterator[dict]:
            if i == len(wanted):
                yield env
            for k, choice in enumerate(left):
                for found in self.unify(wanted[i], choice, env) if i < len(wanted) else ():
                    yield from assign(i + 1, left[:k] + left[k + 1 :], found)

        yield from assign(0, given, env)

    def as_reciprocal(self, p: Expr, g: Expr, env: dict) -> Iterator[dict]:
        """x·s against x/c: s is 1/c. Exact for powers of two, else only where the pattern allows a rounding more."""
        scalar = [a for a in p.args if a.op == "scalar"]
        if {p.op, g.op} != {"mul", "div"} or not scalar or (p.op == "div" and p.args[1] is not scalar[0]):
            return
        x, c = sorted(g.args, key=lambda e: e.op == "const") if g.op == "mul" else g.args
        if c.op != "const" or not c.attr or not (self.reciprocal or abs(math.frexp(c.attr)[0]) == 0.5):
            return
        rest = next(a for a in p.args if a is not scalar[0])
        inverse = Expr("const", (), 1.0 / c.attr, (), -1)
        self.depth += 1
        yield from self.all([(rest, x), (scalar[0], inverse)], env, False)
        self.depth -= 1

    def bind(self, name: str, g: Expr, env: dict, pinned: bool) -> Iterator[dict]:
        had = env.get(name)
        number = bool(g.nodes) and not isinstance(g.nodes[0].meta.get("val"), torch.Tensor)
        if number or g.op in ("const", "scalar", "sym"):
            self.miss(g, f"argument {name} must be a tensor, found {describe(g)}")
        elif had is None:
            yield {**env, name: Bound(g, pinned)}
        elif peel(had.expr) is not peel(g) or (had.pinned and pinned and had.expr is not g):
            self.miss(g, f"argument {name} is two different values")
        else:
            yield {**env, name: Bound(g, True)} if pinned else env

    def capture(self, attr: tuple[str, str], g: Expr, env: dict) -> Iterator[dict]:
        name, form = attr
        if g.op != "const":
            self.miss(g, f"argument {name} must be a number known at compile time, found {describe(g)}")
            return
        try:
            number = FORMS[form][1](g.attr)
        except ZeroDivisionError:
            self.miss(g, f"argument {name} would be 1/0")
            return
        if name in env and not math.isclose(env[name], number, rel_tol=1e-12):
            self.miss(g, f"argument {name} is two different numbers")
        else:
            yield {**env, name: number}


class Matcher:
    """All patterns against one view."""

    def __init__(self, graph: fx.Graph, canon: Canon, patterns: list[Pattern]):
        self.canon = canon
        self.patterns = patterns
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.by_op: dict[str, list[fx.Node]] = {}
        for n, e in canon.of.items():
            again = any(canon.of[a] is e for a in n.all_input_nodes)  # the same value under another name
            if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor) and not again:
                self.by_op.setdefault(peel(e).op, []).append(n)
        self.below = Below()
        self.outcomes: dict = {}
        self.misses: dict[tuple[str, fx.Node], Mismatch] = {}

    def starts(self, t: Template) -> list[fx.Node]:
        """The nodes where a template can start, the latest first."""
        root = t.roots[0]
        nodes = self.by_op.get(root.op, [])
        if root.op in ("mul", "div") and any(a.op == "scalar" for a in root.args):  # x / c for x · s
            other = self.by_op.get("div" if root.op == "mul" else "mul", [])
            nodes = sorted([*nodes, *other], key=self.order.__getitem__)
        wanted = needs(root)
        return [n for n in reversed(nodes) if wanted <= self.below(self.canon.of[n])]

    def candidates(self) -> Iterator[Match]:
        """Matches, the largest templates first, the latest nodes first. Overlaps are for the caller to refuse."""
        ranked = sorted((t for p in self.patterns for t in templates(p)), key=lambda t: -t.size)
        for t in ranked:
            for n in self.starts(t):
                found = self.at(t, n)
                if found is not None:
                    yield found

    def at(self, t: Template, n: fx.Node) -> Match | None:
        unifier = Unifier(t)
        reason, where = "", n
        for first in unifier.unify(t.roots[0], self.canon.of[n], {}):
            for roots, env in self.other_roots(t, unifier, [n], first):
                found = self.complete(t, roots, env)
                if isinstance(found, Match):
                    return found
                where, reason = found
                unifier.best = (t.size, None, reason)
        matched, expr, why = unifier.best
        if not why and not reason:
            return None
        node = expr.nodes[0] if expr is not None and expr.nodes else where
        self.note(Mismatch(t.pattern, n, max(matched, 0), t.size, node, why or reason))
        return None

    def note(self, miss: Mismatch) -> None:
        key = (miss.pattern.name, miss.root)
        if key not in self.misses or miss.matched > self.misses[key].matched:
            self.misses[key] = miss

    def other_roots(self, t: Template, unifier: Unifier, roots: list, env: dict) -> Iterator[tuple]:
        if len(roots) == len(t.roots):
            yield roots, env
            return
        p = t.roots[len(roots)]
        for n in reversed(self.by_op.get(p.op, ())):  # of nodes with one value the last is what others read
            if n not in roots:
                for found in unifier.unify(p, self.canon.of[n], env):
                    yield from self.other_roots(t, unifier, [*roots, n], found)

    def complete(self, t: Template, roots: list[fx.Node], env: dict) -> Match | tuple[fx.Node, str]:
        """Bound expressions -> nodes, in dtypes that reproduce the graph's outputs; then the nodes in between."""
        for name, bound in env.items():
            if isinstance(bound, Bound) and id(peel(bound.expr)) in env:
                return roots[0], f"argument {name} is a value inside it, which would be computed again"
        why = (roots[0], "")
        for peeled, through in ((True, False), (True, True), (False, False), (False, True)):
            arguments: dict[str, object] = {}
            for p, kind in zip(t.pattern.params, t.kinds, strict=True):
                if kind != "tensor":
                    word = kind.removeprefix("=") if p.words else None
                    arguments[p.name] = word if p.words or kind == "none" else p.scalar(env[p.name])
                    continue
                arguments[p.name] = holder(env[p.name], peeled, through)
                if arguments[p.name] is None:
                    return roots[0], ""  # inside one operator of the user's: nothing that a user could change
            found = Match(t.pattern, t, roots, arguments, [])
            reason = mixed(env, arguments) if peeled else ""
            reason = reason or disagreement(found, self.outcomes)
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
        """The nodes inside; a sentence when the match reads something that is not among its arguments."""
        stops = {v.node if isinstance(v, Viewed) else v for v in match.tensors().values()}
        bound = {peel(self.canon.of[s]) for s in stops}
        inside: set[fx.Node] = set()
        stack = list(match.roots)
        while stack:
            n = stack.pop()
            again = [b for b in n.all_input_nodes if peel(self.canon.of[b]) is peel(self.canon.of[n])]
            for a in again or n.all_input_nodes:  # of type_as(x, y) the value is x, whatever y is
                if a in stops or a in inside or a in match.roots or not holds_tensors(a):
                    continue
                value = peel(self.canon.of[a])
                alias = any(peel(self.canon.of[b]) is value for b in a.all_input_nodes)
                if value in bound and not alias:
                    continue  # computed twice: the argument is the other one
                if a.op != "call_function" or (value.op == "input" and not alias):
                    return f"it reads {a.name}, which is not one of the arguments"
                inside.add(a)
                stack.append(a)
        return inside


def holds_tensors(n: fx.Node) -> bool:
    """Sizes and numbers are no values of a match; a tensor or several, as of chunk, are."""
    value = n.meta.get("val")
    return isinstance(value, torch.Tensor) or isinstance(value, (list, tuple)) and len(value) > 0


def mixed(env: dict, arguments: dict) -> str:
    """Without its cast, would an argument reach a matrix product whose other operand keeps its dtype?"""
    bounds = {name: b for name, b in env.items() if isinstance(b, Bound)}
    kept = {value_of(arguments[name]).dtype for name, b in bounds.items() if b.pinned}
    uncast = {value_of(arguments[name]).dtype for name, b in bounds.items() if not b.pinned and b.expr.op == "cast"}
    return "a matrix product would get two dtypes" if kept and uncast - kept else ""


def holder(bound: Bound, peeled: bool, through: bool = False) -> fx.Node | Viewed | None:
    """The first node with the bound value; before rounding casts where they do not matter.

    `through` a permutation that the user has made, but not for this site: a linear layer reads the weight itself.
    """
    e = peel(bound.expr) if peeled and not bound.pinned else bound.expr
    through = through and e.op == "permute" and bool(e.args[0].nodes)
    if e.nodes and not through:
        return e.nodes[0]
    steps: list[tuple[str, tuple]] = []
    while e.op in ("permute", "half", "slice", "not") and (through or not e.nodes):
        through = False
        steps.insert(0, (e.op, e.attr or ()))
        e = e.args[0]
    plain = all(isinstance(v, int) for _, attr in steps for v in attr)
    return seen(e.nodes[0], steps) if e.nodes and plain else None


def disagreement(match: Match, known: dict) -> str:
    """Why the reference on these arguments is not what the graph computes there; empty when it is.

    `known` remembers what the reference gives: the layers of a model ask the same again and again.
    """
    values = [value_of(match.arguments[p.name]) for p in match.pattern.params]
    key = (match.pattern.name, match.template.kinds, *map(signature, values))
    if key not in known:
        known[key] = outcome(match.pattern, values)
    outs = known[key]
    if isinstance(outs, str):
        return f"the reference refuses these arguments: {outs}"
    for (dtype, device, shape), root in zip(outs, match.roots, strict=True):
        want = root.meta["val"]
        if dtype != want.dtype:
            return f"the result is {want.dtype}, the pattern gives {dtype}"
        if device != want.device or len(shape) != want.dim() or not guard_or_false(sym_eq(shape, tuple(want.shape))):
            return f"the result is {tuple(want.shape)}, the pattern gives {shape}"
    return ""


def signature(value):
    """What a shape rule can see of an argument."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, str(tuple(value.shape)), str(value.stride())


def outcome(pattern: Pattern, values: list) -> list[tuple] | str:
    """Dtype, device and shape of what the reference gives on these fakes, or its error."""
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    try:
        with modes[0] if modes else contextlib.nullcontext(), torch.no_grad(), enable_python_dispatcher():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                outs = pattern.reference(*values)  # the dispatcher: torch 2.11, a 3-D matmul of symbolic sizes
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [(o.dtype, o.device, tuple(o.shape)) for o in (outs if isinstance(outs, tuple) else (outs,))]
