"""Makes canonical expressions, hash-consed: equal values are one object.

This file unifies the ways of writing a value that differ by arithmetic alone: subtraction, factors,
powers, reductions, permutations. Composites (rules.py) are asked about every new expression of
their operator.
"""

from __future__ import annotations

import torch

from fusion_backend.capture.sizes import equals, hashable
from fusion_backend.ir.expr import COMMUTATIVE, ROUNDING_DTYPES, Expr, is_const
from fusion_backend.ir.rules import COMPOSITES


def from_right(dims, rank: int) -> tuple[int, ...]:
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    return tuple(sorted(d % rank - rank for d in dims)) if rank else ()


class Builder:
    """Makes expressions. `scalar_of(number)` lets a pattern name its captured scalars, and
    `text_of(word)` its captured texts.
    """

    def __init__(self, scalar_of=None, text_of=None):
        self.table: dict[tuple, Expr] = {}
        self.scalar_of = scalar_of or (lambda number: None)
        self.text_of = text_of or (lambda word: None)
        self.state = None  # values under another grad mode or autocast are different values
        self.trains = lambda node: False  # may a gradient of a node be asked for?
        self.scores: dict[Expr, Expr] = {}  # what scores.scaled made of each value
        # what attention.of_rows made of each value, in each region
        self.flattened: dict[tuple, Expr] = {}

    # Building expressions.

    def make(self, op: str, args=(), attr=None, shape=None) -> Expr:
        args = tuple(args)
        if op in COMMUTATIVE:
            args = tuple(sorted(args, key=lambda a: a.id))
        # 1 is not 1.0, and 0.0 is not -0.0
        key = (op, tuple(a.id for a in args), attr, repr(attr), self.state)
        found = self.table.get(key)
        if found is None:
            found = self.table[key] = Expr(op, args, attr, shape, len(self.table), self.state)
            if op in COMPOSITES.data:
                # It enters the table before its composites are asked, so that a rule may make it
                # again.
                other = COMPOSITES.answer(op, self, *args, shape)
                if other is not None:
                    found = self.table[key] = other
        return found

    def const(self, number) -> Expr:
        scalar = self.scalar_of(number)
        if scalar is not None:
            return self.make("scalar", (), scalar, ())
        if isinstance(number, (torch.SymInt, torch.SymFloat)):
            return self.make("sym", (), str(number), ())
        if isinstance(number, complex):  # which no pattern has
            return self.make("complex number", (), str(number), ())
        return self.make("const", (), float(number), ())

    def word(self, word: str) -> Expr:
        """A text that tells calls apart, such as the name of a process group."""
        name = self.text_of(word)
        return self.make("word", (), word, ()) if name is None else self.make("text", (), name, ())

    def elementwise(self, op: str, *args: Expr, shape, attr=None) -> Expr:
        return self.make(op, (self.broadcastable(a, args, shape) for a in args), attr, shape)

    def broadcastable(self, a: Expr, among: tuple[Expr, ...], shape) -> Expr:
        """An operand without an expand that broadcasting makes unnecessary."""
        if a.op != "expand" or a.args[0].shape is None:
            return a
        others = [b.shape for b in among if b is not a and b.shape is not None]
        try:
            same = torch.broadcast_shapes(a.args[0].shape, *others) == torch.Size(shape)
        except (RuntimeError, TypeError):  # symbolic or incompatible: leave the expand where it is
            return a
        return a.args[0] if same else a

    def add(self, x: Expr, y: Expr, shape) -> Expr:
        return self.elementwise("add", x, y, shape=shape)

    def mul(self, x: Expr, y: Expr, shape) -> Expr:
        for a, b in ((x, y), (y, x)):
            if is_const(b) and b.attr == 1.0:
                return a
            if is_const(b) and a.op == "mul" and any(is_const(c) for c in a.args):
                inner, factor = sorted(a.args, key=is_const)
                return self.mul(inner, self.const(factor.attr * b.attr), shape)
        return self.elementwise("mul", x, y, shape=shape)

    def neg(self, x: Expr, shape) -> Expr:
        return self.const(-x.attr) if is_const(x) else self.mul(x, self.const(-1.0), shape)

    def scale(self, x: Expr, alpha, shape) -> Expr:
        if equals(alpha, 1):
            return x
        return self.const(x.attr * alpha) if is_const(x) else self.mul(x, self.const(alpha), shape)

    def div(self, x: Expr, y: Expr, shape) -> Expr:
        return self.elementwise("div", x, y, shape=shape)

    def clamp(self, x: Expr, low, high, shape) -> Expr:
        if low is not None:
            x = self.make("maximum", (x, low), None, shape)
        if high is not None:
            x = self.make("minimum", (x, high), None, shape)
        return x

    def maximum(self, x: Expr, y: Expr, shape) -> Expr:
        x, y = sorted((x, y), key=is_const)
        # max(min(x, hi), lo) with lo <= hi is min(max(x, lo), hi)
        if is_const(y) and x.op == "minimum":
            inner, high = sorted(x.args, key=is_const)
            if is_const(high) and y.attr <= high.attr:
                return self.clamp(inner, y, high, shape)
        return self.elementwise("maximum", x, y, shape=shape)

    def power(self, x: Expr, p, shape) -> Expr:
        # a number that is known only at run time is none of these
        match p if isinstance(p, (int, float)) else None:
            case 1:
                return x
            case 2:
                return self.mul(x, x, shape)
            case 0.5:
                return self.make("sqrt", (x,), None, shape)
            case -0.5:
                return self.make("rsqrt", (x,), None, shape)
            case -1:
                return self.div(self.const(1.0), x, shape)
        return self.make("pow", (x,), hashable(p), shape)

    def reduce(self, op: str, x: Expr, dims, keepdim: bool, shape) -> Expr:
        """Reductions keep their dimensions; dropping them is a squeeze around it."""
        if x.shape is None:
            return self.make(op, (x,), ("?", hashable(dims), keepdim), shape)
        axes = from_right(dims, len(x.shape))
        reduced = tuple(1 if i - len(x.shape) in axes else s for i, s in enumerate(x.shape))
        out = self.make(op, (x,), axes, reduced)
        return out if keepdim or not axes else self.make("squeeze", (out,), axes, shape)

    def variance(self, x: Expr, dims, correction, keepdim: bool, shape) -> Expr:
        """The biased variance as mean((x - mean(x))²); any other correction is its own operator."""
        if not equals(correction, 0) or x.shape is None:
            return self.reduce(f"var{correction}", x, dims, keepdim, shape)
        mean = self.reduce("mean", x, dims, True, None)
        centred = self.add(x, self.neg(mean, mean.shape), x.shape)
        return self.reduce("mean", self.mul(centred, centred, x.shape), dims, keepdim, shape)

    def permute(self, x: Expr, order: list[int], shape) -> Expr:
        """Leading dimensions that stay put do not count."""
        rank = len(order)
        moved = [d % rank - rank for d in order]
        while moved and moved[0] == -len(moved):
            moved.pop(0)
        if not moved:
            return x
        if x.op == "permute" and len(x.attr) == len(moved):
            combined = tuple(x.attr[d] for d in moved)
            identity = combined == tuple(range(-len(combined), 0))
            return x.args[0] if identity else self.make("permute", x.args, combined, shape)
        return self.make("permute", (x,), tuple(moved), shape)

    def transpose(self, x: Expr, i: int, j: int, shape) -> Expr:
        order = list(range(len(shape)))
        order[i], order[j] = order[j], order[i]
        return self.permute(x, order, shape)

    def linear(self, x: Expr, w: Expr, b: Expr | None, shape) -> Expr:
        wt = (
            self.transpose(w, 0, 1, tuple(reversed(w.shape)))
            if w.shape and len(w.shape) == 2
            else None
        )
        if wt is None:
            return self.make("linear", (x, w) if b is None else (x, w, b), None, shape)
        return self.bias(self.make("matmul", (x, wt), None, shape), b, shape)

    def bias(self, x: Expr, b: Expr | None, shape) -> Expr:
        return x if b is None else self.add(x, b, shape)

    def affine(self, x: Expr, w: Expr | None, b: Expr | None, shape) -> Expr:
        return self.bias(x if w is None else self.mul(x, w, shape), b, shape)

    def cast(self, x: Expr, source: torch.dtype, target: torch.dtype, shape) -> Expr:
        """`cast` changes only the rounding; `convert` changes the kind of number, and the matcher
        never looks through it.
        """
        rounding = source in ROUNDING_DTYPES and target in ROUNDING_DTYPES
        if target in ROUNDING_DTYPES - {torch.float32} and not rounding and not source.is_complex:
            # another kind, then a rounding
            x, rounding = self.make("convert", (x,), torch.float32, shape), True
        return (
            x
            if source == target
            else self.make("cast" if rounding else "convert", (x,), target, shape)
        )
