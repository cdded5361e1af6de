"""Programs on rows: what a generated kernel computes, as text that a graph can carry.

A program is a list of statements and a result:

    v0 = mul t0 t1; v1 = mean v0; v2 = add v1 1e-06; v3 = rsqrt v2; v4 = mul t0 v3; return v4

t0, t1, … are tensors, c0, c1, … boolean ones; both broadcast to the shape of the result, `[...,
n]`. Every operation is computed in fp32, elementwise or over the last dimension, which is kept with
size 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Operand = str | float  # the name of a value, or a number
NAME = re.compile(r"[tcv]\d+")
LENGTH = "n"  # the name of a row's length, in gradients alone


class Operation(NamedTuple):
    """In torch; in Triton, as a format string of the operands; across: over the rows' elements."""

    torch: Callable[..., Tensor]
    triton: str
    across: bool = False


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """A value that equals a number has no gradient, as that of relu(0)."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else torch.where(a <= b, b, a)


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.minimum(a, b) if isinstance(b, Tensor) else torch.where(a >= b, b, a)


# NaN as in torch: the comparison of a NaN is false.
OPERATIONS = {
    "add": Operation(torch.add, "{0} + {1}"),
    "mul": Operation(torch.mul, "{0} * {1}"),
    "div": Operation(torch.div, "{0} / {1}"),
    "maximum": Operation(maximum, "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})"),
    "minimum": Operation(minimum, "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})"),
    "where": Operation(torch.where, "tl.where({0}, {1}, {2})"),
    "exp": Operation(torch.exp, "exp({0})"),
    "sqrt": Operation(torch.sqrt, "tl.sqrt_rn({0})"),
    "rsqrt": Operation(torch.rsqrt, "tl.rsqrt({0})"),
    "sigmoid": Operation(torch.sigmoid, "tl.sigmoid({0})"),
    "tanh": Operation(torch.tanh, "tanh({0})"),
    "erf": Operation(torch.erf, "tl.erf({0})"),
    "abs": Operation(torch.abs, "tl.abs({0})"),
    "gelu": Operation(F.gelu, 'activated({0}, "gelu")'),
    "gelu_tanh": Operation(
        functools.partial(F.gelu, approximate="tanh"), 'activated({0}, "gelu_tanh")'
    ),
    "sum": Operation(lambda x: x.sum(-1, keepdim=True), "row_sum({0}, inside)", True),
    "mean": Operation(lambda x: x.mean(-1, keepdim=True), "row_sum({0}, inside) / N", True),
    "softmax": Operation(lambda x: torch.softmax(x, -1), "row_softmax({0}, inside)", True),
    # in gradients alone
    "greater": Operation(torch.gt, "{0} > {1}"),
    "equal": Operation(torch.eq, "{0} == {1}"),
}
KEEPS_COLUMNS = {"softmax"}  # of the operations across a row
COMMUTATIVE = {"add", "mul", "maximum", "minimum"}
NOTHING = {("add", 0.0), ("mul", 1.0), ("div", 1.0)}  # with this operand they change nothing


class Statement(NamedTuple):
    name: str
    op: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.op} {' '.join(map(written, self.operands))}"


class Program(NamedTuple):
    statements: tuple[Statement, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join([*map(str, self.statements), f"return {' '.join(self.results)}"])


def written(operand: Operand) -> str:
    return operand if isinstance(operand, str) else repr(float(operand))


def is_name(operand: Operand) -> bool:
    return isinstance(operand, str)


@functools.lru_cache(1024)
def parsed(text: str) -> Program:
    """The program of a text. Raises ValueError where it is none."""
    *lines, last = text.split("; ")
    known = {*re.findall(r"\b[tc]\d+\b", text)}
    statements = []
    for line in lines:
        name, _, right = line.partition(" = ")
        op, *operands = right.split(" ")
        if op not in OPERATIONS or not NAME.fullmatch(name) or name in known:
            raise ValueError(f"not a statement: {line!r}")
        read = tuple(o if NAME.fullmatch(o) else float(o) for o in operands)
        if any(is_name(o) and o not in known for o in read):
            raise ValueError(f"{line!r} reads a value that is not computed before it")
        known.add(name)
        statements.append(Statement(name, op, read))
    word, *results = last.split(" ")
    if word != "return" or not results or not known.issuperset(results):
        raise ValueError(f"the program ends with {last!r}")
    return Program(tuple(statements), tuple(results))


def evaluated(program: Program, given: dict[str, Tensor]) -> list[Tensor]:
    """The results of a program on tensors by name, in fp32 and by torch."""
    values = {k: t if t.dtype == torch.bool else t.float() for k, t in given.items()}
    for name, op, operands in program.statements:
        values[name] = OPERATIONS[op].torch(*(values[o] if is_name(o) else o for o in operands))
    return [values[name] for name in program.results]


class Writer:
    """Collects statements; equal ones are one, and what changes nothing is none. first: the number
    of the first name.
    """

    def __init__(self, first: int = 0):
        self.statements: list[Statement] = []
        self.known: dict[tuple, str] = {}
        self.first = first

    def __call__(self, op: str, *operands: Operand) -> str:
        """The name of the value of an operation, of which one operand at least is no number."""
        if op in COMMUTATIVE:  # names come before numbers
            operands = tuple(sorted(operands, key=lambda o: (not is_name(o), written(o))))
        if (op, operands[-1]) in NOTHING:
            return operands[0]
        key = (op, *map(written, operands))
        if key not in self.known:
            name = f"v{self.first + len(self.statements)}"
            self.statements.append(Statement(name, op, operands))
            self.known[key] = name
        return self.known[key]


def without_unread(statements: tuple[Statement, ...], results: tuple[str, ...]) -> Program:
    """The program of these statements that are needed for the results."""
    needed, kept = {*results}, []
    for s in reversed(statements):
        if s.name in needed:
            kept.append(s)
            needed |= {o for o in s.operands if is_name(o)}
    return Program(tuple(reversed(kept)), results)
