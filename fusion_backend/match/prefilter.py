"""Does a template fit at an expression, whatever its arguments are bound to? And if not, how far
does it fit?

The unifier checks whether two arguments are one value. Without that check the parts of a template
are independent, so the answer for one part at one expression is computed once for all templates
that have that part. This keeps the cost of matching linear: layers share parts, templates share
parts, and the unifier runs only where a match is likely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fusion_backend.ir.expr import COMMUTATIVE, Expr, describe, peel
from fusion_backend.match.root_index import CHAINS, flat

# a name that tells draws apart; a number of repeats that the shapes determine
OWN_ATTR = {"dropout", "repeat_heads", "of_window"}


class Skeleton:
    """A part of a template without the names of its arguments. `bit` stands for its operator in a
    set of operators.
    """

    __slots__ = ("args", "attr", "bit", "chain", "links", "op", "parts")

    def __init__(self, op: str, attr, args: tuple[Skeleton, ...], bit: int):
        self.op, self.attr, self.args, self.bit = op, attr, args, bit
        self.parts = [i for i, a in enumerate(args) if a.op != "var"]  # which args can fail to fit
        self.links = bit  # the operators of a chain that starts here
        self.chain: list[Skeleton] = []  # its operands, for a chain of more than two
        if op in CHAINS:
            operands: list[Skeleton] = []
            for a in args:
                linked = a.op == op
                operands += (a.chain or list(a.args)) if linked else [a]
                self.links |= a.links if linked else 0
            self.chain = operands if len(operands) > 2 else []


class Fit(NamedTuple):
    """The operators that have a counterpart, and the place where the deepest of the others lacks
    one.
    """

    matched: int  # a set of operators, one bit each
    stopped: tuple[Skeleton, Expr] | None = None  # the expected operator, and the actual one


OPEN = Fit(0)
KNOWN: dict[tuple, Skeleton] = {}
REMEMBERED = 10_000  # the catalogue has about 400; notebooks define patterns again and again


def make_room() -> None:
    """Make room for the bits of a template's skeletons, which must all differ."""
    if len(KNOWN) > REMEMBERED:
        KNOWN.clear()


def skeleton_of(e: Expr, known: dict[Expr, Skeleton]) -> Skeleton:
    """The skeleton of a template's expression; `known` is the template's own."""
    if e not in known:
        attr = None if e.op in ("var", "scalar", "text", *OWN_ATTR) else e.attr
        args = tuple(skeleton_of(a, known) for a in e.args)
        key = (e.op, attr, args)
        if key not in KNOWN:
            KNOWN[key] = Skeleton(e.op, attr, args, 1 << len(KNOWN))
        known[e] = KNOWN[key]
    return known[e]


class Fitting:
    """Remembers the answers for one view."""

    def __init__(self):
        self.known: dict[tuple[Skeleton, Expr], Fit] = {}
        self.flat: dict[Expr, list[Expr]] = {}

    def __call__(self, p: Skeleton, g: Expr) -> Fit:
        if p.op == "var":
            return OPEN
        found = self.known.get((p, g))
        if found is None:
            found = self.known[p, g] = self.compare(p, peel(g))
        return found

    def compare(self, p: Skeleton, g: Expr) -> Fit:
        if p.op == "scalar" or p.op == "const":
            agree = g.op == "const" and (
                p.op == "scalar" or math.isclose(p.attr, g.attr, rel_tol=1e-6)
            )
            return OPEN if agree else Fit(0, (p, g))
        if p.op == "text":
            return OPEN if g.op == "word" else Fit(0, (p, g))
        if p.op == "permute" and p.args[0].op == "var" and (p.op, p.attr) != (g.op, g.attr):
            return Fit(p.bit)
        if p.op != g.op:
            return self.reciprocal(p, g)
        if (p.attr != g.attr and p.op not in OWN_ATTR) or len(p.args) != len(g.args):
            return Fit(0, (p, g))
        best = self.all(p, g.args)
        if best.stopped is None:
            return best
        if p.op in COMMUTATIVE and g.args[0] is not g.args[1]:
            best = better(best, self.all(p, g.args[::-1]))
        if best.stopped and p.chain:
            best = better(best, self.regrouped(p, g))
        if best.stopped and p.op == "where" and p.args[0].op == "var":  # the complement of the mask
            best = better(best, self.all(p, (g.args[0], g.args[2], g.args[1])))
        return best

    def all(self, p: Skeleton, given: tuple[Expr, ...]) -> Fit:
        matched, stopped, deepest = p.bit, None, -1
        for i in p.parts:
            part, why = self.known.get((p.args[i], given[i])) or self(p.args[i], given[i])
            matched |= part
            if why is not None and part.bit_count() > deepest:
                stopped, deepest = why, part.bit_count()
        return Fit(matched, stopped)

    def operands(self, g: Expr) -> list[Expr]:
        if g not in self.flat:
            self.flat[g] = flat(g, g.op)
        return self.flat[g]

    def regrouped(self, p: Skeleton, g: Expr) -> Fit:
        """a·(b·c) against (a·b)·c: the operands of both chains in any order."""
        given = self.operands(g)
        if len(given) != len(p.chain):
            return Fit(0, (p, g))
        if not all(
            w.op == "var" or any(self(w, x).stopped is None for x in given) for w in p.chain
        ):
            return Fit(0, (p, g))
        fits = [[self(w, x) for x in given] for w in p.chain]

        def assign(i: int, left: list[int]) -> int | None:
            if i == len(fits):
                return p.links
            for j in left:
                if not fits[i][j].stopped:
                    rest = assign(i + 1, [k for k in left if k != j])
                    if rest is not None:
                        return rest | fits[i][j].matched
            return None

        found = assign(0, list(range(len(given))))
        return Fit(0, (p, g)) if found is None else Fit(found)

    def reciprocal(self, p: Skeleton, g: Expr) -> Fit:
        """x·s against x/c, and the other way round: s is 1/c. The unifier checks whether the
        rounding is allowed.
        """
        scalar = [a for a in p.args if a.op == "scalar"]
        if (
            {p.op, g.op} == {"mul", "div"}
            and scalar
            and (p.op == "mul" or p.args[1].op == "scalar")
        ):
            x, c = sorted(g.args, key=lambda e: e.op == "const") if g.op == "mul" else g.args
            if c.op == "const" and c.attr:
                matched, stopped = self(next(a for a in p.args if a is not scalar[0]), x)
                return Fit(matched | p.bit, stopped)
        return Fit(0, (p, g))


def better(a: Fit, b: Fit) -> Fit:
    if b.stopped is None or b.matched.bit_count() > a.matched.bit_count():
        return b
    return a


def expected(p: Skeleton, g: Expr) -> str:
    """Where a fit stopped, in words."""
    if p.op == "scalar":
        return f"expected a number known at compile time, found {describe(g)}"
    if p.op == "const":
        return f"expected {p.attr:g}, found {describe(g)}"
    if p.op == "text":
        return f"expected a name, found {describe(g)}"
    if p.op == g.op:
        return f"expected {p.op} over {p.attr}, found {g.attr}"
    return f"expected {p.op}, found {describe(g)}"
