"""Reads a view's tensors element by element: where its place is given by index variables, what is
the element?

The rules (elements.py) say what an operator makes of the elements of its operands. What no rule
explains is a `read` of the node itself, so that nothing that depends on data, on memory that is
written to, or on an operator that is not known there, is ever guessed.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import schema_of, statically_known_true
from fusion_backend.masks.terms import ZERO, Linear, Ranges, Term, TooLarge, is_condition, leaves

INTEGERS = {torch.int64, torch.int32}
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
DEEPEST, LONGEST = 60, 20_000  # operators below each other; elements in all


class Arguments:
    """The arguments of a node by their schema names."""

    def __init__(self, node: fx.Node):
        names = [a.name for a in schema_of(node.target).arguments]
        self.node, self.val = node, node.meta["val"]
        self.values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def __getitem__(self, name: str):
        return self.values.get(name)

    def number(self, name: str, default=None):
        """A size, a dimension or a step, symbolic perhaps."""
        value = self.values.get(name, default)
        return value.meta.get("val") if isinstance(value, fx.Node) else value

    def dim(self, name: str, default=None) -> int:
        return self.number(name, default) % max(self.node.args[0].meta["val"].dim(), 1)


class Reader:
    """Elements of one view, for index variables of these sizes. `unknown(node)` says what may not
    be looked into, `behind(node)` what a node is another name of.
    """

    def __init__(self, sizes: dict[str, object], rules: dict, unknown, behind=lambda n: n):
        self.ranges, self.rules, self.unknown = Ranges(dict(sizes)), rules, unknown
        self.behind = behind
        self.memo: dict[tuple, object] = {}
        self.made_by: dict[object, fx.Node] = {}  # a condition -> the node that compares
        self.depth = 0

    def element(self, n: fx.Node, at: tuple[Linear, ...]):
        """The element of n at a place; a `read` of n where no rule tells more."""
        n = self.behind(n)
        shape = n.meta["val"].shape
        at = tuple(ZERO if is_one(size) else i for i, size in zip(at, shape, strict=True))
        key = (n, at)
        if key not in self.memo:
            self.memo[key] = self.looked_up(n, at)
        return self.memo[key]

    def looked_up(self, n: fx.Node, at: tuple[Linear, ...]):
        rule = self.rules.get(schema_of(n.target).name) if is_lowered(n) else None
        found = None
        if (
            rule is not None
            and self.depth < DEEPEST
            and len(self.memo) < LONGEST
            and not self.unknown(n)
        ):
            self.depth += 1
            try:
                found = rule(self, Arguments(n), at)
            except TooLarge:
                found = None
            self.depth -= 1
        if found is None or not self.fits(found, n.meta["val"].dtype):
            return Term("read", (n, at))
        if isinstance(found, Term):
            self.made_by.setdefault(found, n)
        return found

    def fits(self, t, dtype: torch.dtype) -> bool:
        """Is it an element of such a tensor, without an overflow?"""
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
        """What broadcasts against a result at `at`: a tensor's element, or a number."""
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
    return (
        x.meta["val"].dtype
        if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)
        else None
    )
