"""Canonical expressions -> a program on rows."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.extend.generated_rows import CONDITIONS, TENSORS
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import Expr, peel
from fusion_backend.kernels.generated.program import Operand, Program, Writer, is_name

# Canonical operators that are operations of programs under the same name.
ELEMENTWISE = {"add", "mul", "div", "maximum", "minimum", "exp", "sqrt", "rsqrt", "sigmoid", "tanh"}
ELEMENTWISE |= {"erf", "abs"}
ACROSS = {"sum": (-1,), "mean": (-1,), "softmax": -1}  # and the attribute of the last dimension
GELU = {"none": "gelu", "tanh": "gelu_tanh"}
# The translation stops here. The guard refuses programs of more than 48 statements, and says so.
MOST_STATEMENTS = 128


class NoProgram(Exception):
    """A value is none that a program can compute."""


def step(e: Expr) -> str:
    """The operation of a program that computes a canonical operator; "" for none."""
    if e.op == "gelu":
        return GELU.get(e.attr, "")
    if e.op in ACROSS:
        return e.op if e.attr == ACROSS[e.op] else ""
    return e.op if e.op in ELEMENTWISE or e.op == "where" else ""


class Translation:
    """One program: the values of these nodes are computed, all others are its tensors."""

    def __init__(self, canon: Canon, inside: Set[fx.Node], shape: tuple):
        self.canon, self.inside, self.shape = canon, inside, shape
        self.write = Writer()
        self.known: dict[Expr, str] = {}
        self.arguments: dict[str, fx.Node] = {}

    def program(self, root: fx.Node) -> Program:
        """The program of a node's value. Raises NoProgram."""
        result = self.computed(peel(self.canon.of[root]))
        return Program(tuple(self.write.statements), (result,))

    def operand(self, e: Expr) -> Operand:
        """A number, the name of a value that is computed, or that of a tensor. A value that no node
        has is computed.
        """
        value = peel(e)
        number = value.args[0] if value.op == "expand" else value
        if number.op == "const":
            return in_fp32(number.attr)
        ours = not value.nodes or not self.inside.isdisjoint(value.nodes)
        return self.computed(value) if ours and step(value) else self.argument(e)

    def computed(self, e: Expr) -> str:
        if e not in self.known:
            op = step(e)
            if not op or len(self.write.statements) > MOST_STATEMENTS:
                raise NoProgram(f"{e.op} is no operation of a program")
            if e.op in ACROSS and not (e.args[0].shape and same(e.args[0].shape, self.shape)):
                raise NoProgram(f"{e.op} of another shape")
            chosen = e.op == "where"  # by its first operand
            operands: list[Operand] = [self.argument(e.args[0], True)] if chosen else []
            operands += map(self.operand, e.args[chosen:])
            if not any(map(is_name, operands)):
                raise NoProgram("an operation on numbers alone")
            self.known[e] = self.write(op, *operands)
        return self.known[e]

    def argument(self, e: Expr, condition: bool = False) -> str:
        """The name of a tensor: before casts that do not change it. No value is both a tensor and
        computed.
        """
        while e.op == "cast" and e.nodes and widens(e):
            e = e.args[0]
        if e not in self.known:
            if not e.nodes:
                raise NoProgram("a value that no node has")
            value = e.nodes[0].meta.get("val")
            if not isinstance(value, torch.Tensor) or (value.dtype == torch.bool) != condition:
                raise NoProgram("a value of another kind")
            if not fits(value.shape, self.shape):
                raise NoProgram("a value of another shape")
            kind, most = ("c", CONDITIONS) if condition else ("t", TENSORS)
            number = sum(name[0] == kind for name in self.arguments)
            if number == most:
                raise NoProgram(f"more than {most} tensors")
            self.known[e] = f"{kind}{number}"
            self.arguments[f"{kind}{number}"] = e.nodes[0]
        return self.known[e]


def in_fp32(number: float) -> float:
    """A number of a kernel. Raises NoProgram for one that fp32 has not, or only with fewer digits:
    Triton computes with it in fp64.
    """
    limits = torch.finfo(torch.float32)
    if math.isfinite(number) and number and not limits.tiny <= abs(number) <= limits.max:
        raise NoProgram(f"{number} is no number of fp32")
    return number


def widens(e: Expr) -> bool:
    """Is it a cast that changes no value?"""
    before = e.args[0].nodes[0].meta["val"].dtype if e.args[0].nodes else None
    return before is not None and torch.promote_types(before, e.attr) == e.attr


def fits(shape, full) -> bool:
    """Is a shape known to broadcast to another one?"""
    return len(shape) <= len(full) and all(
        same((a,), (b,)) or same((a,), (1,))
        for a, b in zip(reversed(shape), reversed(full), strict=False)
    )
