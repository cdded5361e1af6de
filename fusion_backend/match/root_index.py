"""Where in a view can a template start? By root operator, then by the operators one and two levels
below it.

A node passes if it has every operator that the template has there. This is only a necessary
condition: it spares the matcher nodes that cannot match, so that the cost of matching grows with
the graph and not with the number of patterns.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusion_backend.ir.expr import LEAVES, Expr, peel

# Looking through these loses nothing: a cast is peeled, and x/c may stand for x·s.
SAME = {"div": "mul"}
CHAINS = {"add", "mul"}


def flat(e: Expr, op: str, most: int = 6) -> list[Expr]:
    """The operands of a chain of one associative operator, in order; empty for a chain of more than
    `most`.

    A residual stream is such a chain, as long as the model is deep: it must not be walked again at
    every layer.
    """
    found: list[Expr] = []
    pending = list(reversed(e.args))
    while pending:
        a = pending.pop()
        inner = peel(a)
        if inner.op == op:
            pending.extend(reversed(inner.args))
        else:
            found.append(a)
        if len(found) + len(pending) > most:
            return []
    return found


def kind(e: Expr) -> str:
    return SAME.get(e.op, e.op)


class Below:
    """The operators below an expression: those one level down, and pairs two levels down."""

    def __init__(self):
        self.memo: dict[Expr, frozenset] = {}

    def __call__(self, e: Expr) -> frozenset:
        e = peel(e)
        if e not in self.memo:
            found: set = set()
            for a in self.operands(e):
                found.add(kind(a))
                found |= {(kind(a), kind(b)) for b in self.operands(a) if b.op not in LEAVES}
            self.memo[e] = frozenset(found)
        return self.memo[e]

    def operands(self, e: Expr) -> Iterable[Expr]:
        """The operands and, in a chain, those of the whole chain, because a pattern may be
        parenthesised differently.
        """
        direct = [peel(a) for a in e.args]
        if e.op in CHAINS and any(a.op == e.op for a in direct):
            direct += [peel(a) for a in shallow(e)]
        return [a for a in direct if a.op not in LEAVES]


def shallow(e: Expr, depth: int = 4) -> list[Expr]:
    """The operands of a chain, not deeper than patterns go."""
    found = []
    for a in e.args:
        a = peel(a)
        found += shallow(a, depth - 1) if a.op == e.op and depth else [a]
    return found


def needs(root: Expr) -> frozenset:
    """The operators that a template needs below its root; inside a chain without its links, which
    may be regrouped.
    """
    root = peel(root)
    links = root.op if root.op in CHAINS else None
    found: set = set()
    for a in shallow(root, 8) if links else [peel(a) for a in root.args]:
        if a.op in LEAVES:
            continue
        found.add(kind(a))
        inner = [peel(b) for b in a.args] if a.op not in CHAINS else shallow(a, 8)
        found |= {(kind(a), kind(b)) for b in inner if b.op not in LEAVES}
    return frozenset(found)
