"""Template x expression -> what its arguments are bound to.

Backtracks over the order of commutative operands, but only where the parts fit (prefilter.py).
Casts between fp32, bf16 and fp16 are looked through: a fused kernel computes in fp32 and rounds
once per output. The operands of a matrix product keep their dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.ir.argument_views import one_value, unpermuted
from fusion_backend.ir.expr import COMMUTATIVE, LEAVES, Expr, describe, graph_value, peel
from fusion_backend.match.prefilter import OWN_ATTR, Fitting
from fusion_backend.match.root_index import CHAINS, flat
from fusion_backend.match.templates import FORMS, Template

# A cast before these operators changes the result.
KEEPS_DTYPE = {"matmul", "linear", "aten.conv.windows"}
BUDGET = 5_000  # unification steps for one template at one node


@dataclasses.dataclass(frozen=True)
class Bound:
    expr: Expr
    pinned: bool  # its dtype matters


class Unifier:
    """Match one template at one expression, remembering the deepest point that was reached.

    An environment maps arguments to the values they are bound to, and expressions to the operators
    of the template that they match.
    """

    def __init__(self, template: Template, fitting: Fitting):
        self.reciprocal = template.pattern.reciprocal
        self.fitting, self.skeletons = fitting, template.skeletons
        self.depth = 0
        self.steps = 0
        self.best: tuple[int, Expr | None, str] = (-1, None, "")

    @property
    def exhausted(self) -> str:
        """Why it gave up, if it did."""
        told = f"matching stopped after {BUDGET:,} steps: it can be read in too many ways"
        return told if self.steps > BUDGET else ""

    def miss(self, g: Expr, reason: str) -> None:
        if self.depth > self.best[0]:
            self.best = (self.depth, g, reason)

    def unify(self, p: Expr, g: Expr, env: dict, pinned: bool = False) -> Iterator[dict]:
        self.steps += 1
        if self.steps > BUDGET:
            return
        if p.op in LEAVES:
            found = self.leaf(p, g, env, pinned)
            if found is not None:
                yield found
        elif (
            p.op == "permute" and p.args[0].op == "var" and pinned and g.op == "cast"
        ):  # transposed, then cast
            yield from self.unify(p.args[0], unpermuted(g, p.attr), env, pinned)
        else:
            yield from self.operator(p, peel(g), env, pinned and p.op == "permute")

    def leaf(self, p: Expr, g: Expr, env: dict, pinned: bool) -> dict | None:
        """An argument, a captured number or a constant: one answer, or none."""
        if p.op == "var":
            return self.bind(p.attr, g, env, pinned)
        if p.op == "scalar":
            return self.capture(p.attr, peel(g), env)
        if p.op == "text":
            return self.text(p.attr, g, env)
        if g.op == "const" and math.isclose(p.attr, g.attr, rel_tol=1e-6):
            return env
        return self.miss(g, f"expected {p.attr:g}, found {describe(g)}")

    def operator(self, p: Expr, g: Expr, env: dict, pinned: bool) -> Iterator[dict]:
        if p.op == "permute" and p.args[0].op == "var" and (p.op, p.attr) != (g.op, g.attr):
            yield from self.unify(p.args[0], unpermuted(g, p.attr), env, pinned)
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
        # silu(x w) is no gated_linear(x, w, w), which would multiply twice
        if env.get(g, p) is not p:
            self.miss(g, f"{describe(g)} would have to match two operators of the pattern")
            return
        env = {**env, g: p}
        self.depth += 1
        pinned = pinned or p.op in KEEPS_DTYPE
        mixed = bool(self.skeletons[p].chain) and len({broadcast(w, p) for w in flat(p, p.op)}) > 1
        if mixed:  # which operand is broadcast says more than the parentheses
            yield from self.chain(p, g, env, mixed)
        for given in orders(p, g):
            if all(map(self.fits, p.args, given)):
                yield from self.all(list(zip(p.args, given, strict=True)), env, pinned)
        if p.op in CHAINS and not mixed:
            yield from self.chain(p, g, env, mixed)
        elif p.op == "where" and p.args[0].op == "var":
            mask, x, y = g.args
            complement = Expr("not", (mask,), None, mask.shape, -1)
            yield from self.all(list(zip(p.args, (complement, y, x), strict=True)), env, False)
        self.depth -= 1

    def fits(self, p: Expr, g: Expr) -> bool:
        return self.fitting(self.skeletons[p], g).stopped is None

    def all(self, pairs: list, env: dict, pinned: bool, i: int = 0) -> Iterator[dict]:
        while i < len(pairs) and pairs[i][0].op in LEAVES:
            found = self.leaf(*pairs[i], env, pinned)
            if found is None:
                return
            env, i = found, i + 1
        if i == len(pairs):
            yield env
            return
        for found in self.unify(*pairs[i], env, pinned):
            yield from self.all(pairs, found, pinned, i + 1)

    def chain(self, p: Expr, g: Expr, env: dict, mixed: bool) -> Iterator[dict]:
        """a·(b·c) against (a·b)·c: the operands of both chains in any order, first those that are
        broadcast alike.
        """
        if not self.skeletons[p].chain or len(self.skeletons[p].chain) != len(
            self.fitting.operands(g)
        ):
            return
        wanted, given = flat(p, p.op), self.fitting.operands(g)
        wanted.sort(key=lambda e: e.op in ("var", "scalar"))  # try first the operands that can fail

        def assign(i: int, left: list[Expr], env: dict) -> Iterator[dict]:
            if i == len(wanted):
                yield env
                return
            whole = mixed and not broadcast(wanted[i], p)
            likely = sorted(
                range(len(left)), key=lambda k: mixed and broadcast(left[k], g) is whole
            )
            for k in likely:
                if self.fits(wanted[i], left[k]):
                    for found in self.unify(wanted[i], left[k], env):
                        yield from assign(i + 1, left[:k] + left[k + 1 :], found)

        yield from assign(0, given, env)

    def as_reciprocal(self, p: Expr, g: Expr, env: dict) -> Iterator[dict]:
        """x·s against x/c: s is 1/c. Exact for powers of two, else only where the pattern allows a
        rounding more.
        """
        scalar = [a for a in p.args if a.op == "scalar"]
        if (
            {p.op, g.op} != {"mul", "div"}
            or not scalar
            or (p.op == "div" and p.args[1] is not scalar[0])
        ):
            return
        x, c = sorted(g.args, key=lambda e: e.op == "const") if g.op == "mul" else g.args
        if (
            c.op != "const"
            or not c.attr
            or not (self.reciprocal or abs(math.frexp(c.attr)[0]) == 0.5)
        ):
            return
        rest = next(a for a in p.args if a is not scalar[0])
        inverse = Expr("const", (), 1.0 / c.attr, (), -1)
        self.depth += 1
        yield from self.all([(rest, x), (scalar[0], inverse)], env, False)
        self.depth -= 1

    def bind(self, name: str, g: Expr, env: dict, pinned: bool) -> dict | None:
        had = env.get(name)
        number = bool(g.nodes) and not isinstance(g.nodes[0].meta.get("val"), torch.Tensor)
        if number or g.op in ("const", "scalar", "sym"):
            return self.miss(g, f"argument {name} must be a tensor, found {describe(g)}")
        if had is None:
            return {**env, name: Bound(g, pinned)}
        before, now = graph_value(had.expr), graph_value(g)
        if not one_value(graph_value(peel(before)), graph_value(peel(now))) or (
            had.pinned and pinned and not one_value(before, now)
        ):
            return self.miss(g, f"argument {name} is two different values")
        return {**env, name: Bound(g, True)} if pinned else env

    def text(self, name: str, g: Expr, env: dict) -> dict | None:
        if g.op != "word" or env.get(name, g.attr) != g.attr:
            return self.miss(g, f"argument {name} must be one name, found {describe(g)}")
        return {**env, name: g.attr}

    def capture(self, attr: tuple[str, str], g: Expr, env: dict) -> dict | None:
        name, form = attr
        if g.op != "const":
            return self.miss(
                g, f"argument {name} must be a number known at compile time, found {describe(g)}"
            )
        try:
            number = FORMS[form][1](g.attr)
        except ZeroDivisionError:
            return self.miss(g, f"argument {name} would be 1/0")
        if name in env and not math.isclose(env[name], number, rel_tol=1e-12):
            return self.miss(g, f"argument {name} is two different numbers")
        return {**env, name: number}


def orders(p: Expr, g: Expr) -> tuple:
    """The orders of the operands to try. If one operand of the template is broadcast and the other
    is not, the graph's broadcast operand is tried for it first.
    """
    if p.op not in COMMUTATIVE:
        return (g.args,)
    wanted = [broadcast(a, p) for a in p.args]
    crossed = wanted[0] != wanted[-1] and [broadcast(a, g) for a in g.args] == wanted[::-1]
    return (g.args[::-1], g.args) if crossed else (g.args, g.args[::-1])


def broadcast(e: Expr, to: Expr) -> bool:
    """Has an operand another shape than the result?"""
    return None not in (e.shape, to.shape) and not same(e.shape, to.shape)
