"""Reads a view's tensors element by element, as terms: the element whose indices are given by index
variables.

The rules (element_rules.py) say what an operator makes of the elements of its operands. An element
that no rule explains is a `read` of the node itself. A value that depends on data, on memory that
is written to, or on an unknown operator is thus never guessed.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.ir.rules import UNREADABLE, Again, Table, read
from fusion_backend.ir.schema_args import Call
from fusion_backend.masks.terms import ZERO, Linear, Ranges, Term, TooLarge, is_condition, leaves

INTEGERS = {torch.int64, torch.int32}
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
DEEPEST, LONGEST = 60, 20_000  # operators below each other; elements in all
# A parameter of a rule of this type is the operand's element that the result is computed from,
# where operands broadcast against the result.
Element = bool | float | Linear | Term


def operand(value, reader: Reader, call: Call, at: tuple[Linear, ...]):
    found = reader.operand(value, at)
    return UNREADABLE if found is None and value is not None else found


def as_it_is(value, *context):
    return value


# ATen operator -> element of its result. A rule gets the reader `r`, the `Call`, the indices `at`,
# one Linear a dimension, and then the arguments.
ELEMENTS = Table(
    "elements of masks", 3, {Term: operand, fx.Node: as_it_is, list[fx.Node]: as_it_is}
)


class Reader:
    """Elements of one view, for index variables of these sizes. `unknown(node)` says which nodes
    may not be looked into, `resolve(node)` of which node a node is another name.
    """

    def __init__(self, sizes: dict[str, object], unknown, resolve=lambda n: n):
        self.ranges, self.unknown = Ranges(dict(sizes)), unknown
        self.resolve = resolve
        self.memo: dict[tuple, object] = {}
        self.made_by: dict[object, fx.Node] = {}  # a condition -> the node that compares
        self.pending: list[tuple] = []  # elements that are being read, each for the one before it

    def element(self, n: fx.Node, at: tuple[Linear, ...]):
        """The element of n at these indices; a `read` of n where no rule says more.

        In a rule it raises Again where the element is not known yet: it is read first, so that no
        rule runs inside another, however deep the graph is.
        """
        n = self.resolve(n)
        shape = n.meta["val"].shape
        key = (n, tuple(ZERO if is_one(size) else i for i, size in zip(at, shape, strict=True)))
        if key not in self.memo:
            if self.pending:
                self.pending.append(key)
                raise Again
            self.pending.append(key)
            self.run()
        return self.memo[key]

    def run(self) -> None:
        while self.pending:
            key = self.pending[-1]
            try:
                self.memo[key] = self.by_rule(*key)
                self.pending.pop()
            except Again:
                pass
            except BaseException:
                self.pending.clear()
                raise

    def by_rule(self, n: fx.Node, at: tuple[Linear, ...]):
        found = None
        within = len(self.pending) <= DEEPEST and len(self.memo) < LONGEST
        if within and is_lowered(n) and not self.unknown(n):
            try:
                found = self.answer(n, (self, Call(n), at))
            except TooLarge:
                found = None
        if found is None or not self.fits(found, n.meta["val"].dtype):
            return Term("read", (n, at))
        if isinstance(found, Term):
            self.made_by.setdefault(found, n)
        return found

    def answer(self, n: fx.Node, context: tuple):
        for rule, plan in ELEMENTS.plan(n.target):
            arguments = read(n, plan, context)
            found = None if arguments is None else rule.ask(*context, *arguments)
            if found is not None:
                return found
        return None

    def variable(self, n: fx.Node, size) -> Linear:
        """An index variable of its own for a node that looks at all elements along a dimension."""
        name = f"along {n.name}"
        self.ranges.sizes[name] = size
        return Linear({name: 1})

    def fits(self, t, dtype: torch.dtype) -> bool:
        """Does it fit such a tensor without an overflow?"""
        if isinstance(t, Term) and t.op == "where":
            return all(self.fits(x, dtype) for x in leaves(t))
        if isinstance(t, Term) and t.op == "read":
            return t.args[0].meta["val"].dtype == dtype
        if dtype == torch.bool:
            return is_condition(t)
        if isinstance(t, float):
            return dtype in FLOATS
        if not isinstance(t, Linear) or dtype not in INTEGERS:
            return False
        # Coefficients are less than 2**30 and sizes than 2**31: no int64 overflows.
        return dtype == torch.int64 or all(
            statically_known_true(self.ranges.extreme(t, sign) > -(1 << 31)) for sign in (1, -1)
        )

    def operand(self, x, at: tuple[Linear, ...]):
        """The operand that broadcasts against a result at `at`: a tensor's element, or a number."""
        if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor):
            rank = x.meta["val"].dim()
            return self.element(x, at[len(at) - rank :])
        value = x.meta.get("val") if isinstance(x, fx.Node) else x
        if isinstance(value, (bool, float)):
            return value
        return Linear({}, value) if isinstance(value, (int, torch.SymInt)) else None


def is_one(size) -> bool:
    return statically_known_true(size == 1)


def dtype_of(x) -> torch.dtype | None:
    """None of what is no tensor."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return value.dtype if isinstance(value, torch.Tensor) else None
