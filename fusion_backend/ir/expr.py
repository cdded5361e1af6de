"""Canonical expressions: a value, independent of the operators that a graph computes it with."""

from __future__ import annotations

import torch
from torch import fx

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "and", "or"}
# Operators whose cost is negligible when they are computed twice.
FREE = {
    "permute",
    "view",
    "rows",
    "expand",
    "squeeze",
    "unsqueeze",
    "half",
    "every_other",
    "slice",
    "of_window",
    "cast",
    "arange",
}
FREE |= {"const", "scalar", "sym"}
# In x.type_as(y) only the dtype or shape of y counts: Inductor does not compute y for it.
LIKE = {
    torch.ops.aten.type_as.default,
    torch.ops.aten.expand_as.default,
    torch.ops.aten.view_as.default,
}
NUMBERS = ("const", "scalar", "sym")
LEAVES = {"var", "scalar", "const", "sym", "input", "text", "word"}
# The depth of a chain of operators: more casts, views, factors or biases than anybody writes.
LOOKED_THROUGH = 16
# Between these a cast only changes the rounding of an intermediate value, and a fused kernel rounds
# once.
ROUNDING_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Expr:
    """One canonical value: an operator, its operands, and whatever else distinguishes it."""

    __slots__ = (
        "args",
        "attr",
        "id",
        "nodes",
        "op",
        "peeled",
        "rows",
        "shape",
        "state",
        "graph_value",
    )

    def __init__(self, op: str, args: tuple[Expr, ...], attr, shape, id: int, state=None):
        self.op, self.args, self.attr, self.shape, self.id, self.state = (
            op,
            args,
            attr,
            shape,
            id,
            state,
        )
        self.nodes: list[fx.Node] = []  # graph nodes with this value, in graph order
        # this value as rows [n, last], for when no node holds the value itself
        self.rows: Expr | None = None
        # this value as the graph holds it, where a rule put it into other terms
        self.graph_value: Expr | None = None
        self.peeled: Expr = args[0].peeled if op == "cast" else self

    @property
    def of_run_time(self) -> bool:
        """Is it a number of the graph that is known only at run time?"""
        return bool(self.nodes) and isinstance(
            self.nodes[0].meta.get("val"), (torch.SymFloat, torch.SymInt)
        )

    def __reduce__(self):
        """Kept on disk without the graph it was read from."""
        return Expr, (self.op, self.args, self.attr, self.shape, self.id)

    def __repr__(self):
        attr = "" if self.attr is None else f"[{self.attr}]"
        args = f"({', '.join(map(repr, self.args))})" if self.args else ""
        return f"{self.op}{attr}{args}"


def in_library(op: str) -> bool:
    """Does Inductor call a library for it, so that its operands and result are in memory anyway?"""
    return op in ("matmul", "linear") or op.startswith("aten.conv")


def peel(e: Expr) -> Expr:
    """Without the casts around it that only change a rounding."""
    return e.peeled


def graph_value(e: Expr) -> Expr:
    """The expression in the terms of the graph, before rules put it into other terms."""
    return e.graph_value or e


def describe(e: Expr) -> str:
    if e.op == "const":
        return f"{e.attr:g}"
    known = {"input": f"the value {e.attr}", "sym": "a symbolic number", "word": f"{e.attr!r}"}
    return known.get(e.op, e.op.removeprefix("aten.").split(".")[0])


def is_const(e: Expr) -> bool:
    return e.op == "const"


def number_and_rest(e: Expr) -> tuple[Expr | None, Expr | None]:
    """A sum or product of one number and one value; (None, None) where it is not."""
    if e.op not in ("add", "mul") or len(e.args) != 2:
        return None, None
    numbers = [a for a in e.args if a.op in NUMBERS]
    rest = [a for a in e.args if a.op not in NUMBERS]
    return (numbers[0], rest[0]) if len(numbers) == len(rest) == 1 else (None, None)
