"""Terms: symbolic elements of tensors, as functions of index variables.

A term is a bool, a float, a Linear (an integer) or a Term over them. Sizes may be symbolic;
statements about them are proven without a guard.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from fusion_backend.compat.torch import statically_known_true, sym_key

LARGEST = 1 << 30  # bound on the numbers that are followed, so that sums of a few stay within int32
LONGEST = 200  # operators of a term


class TooLarge(Exception):
    """A term that is not worth following further."""


def plain(number):
    """A symbolic integer that is a constant, as an int."""
    known = number.node.maybe_as_int() if isinstance(number, torch.SymInt) else number
    return number if known is None else known


class Linear:
    """Σ coefficient · index + constant, where the constant may hold symbolic sizes."""

    __slots__ = ("constant", "key", "terms")

    def __init__(self, terms: dict[str, int], constant=0):
        self.terms = {v: k for v, k in sorted(terms.items()) if k}
        self.constant = plain(constant)
        sizes = [*self.terms.values(), *([self.constant] if isinstance(self.constant, int) else ())]
        if any(abs(k) > LARGEST for k in sizes):
            raise TooLarge
        self.key = (tuple(self.terms.items()), sym_key(self.constant))

    def __eq__(self, other):
        return isinstance(other, Linear) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def __repr__(self):
        return " + ".join([*(f"{k}·{v}" for v, k in self.terms.items()), str(self.constant)])

    def plus(self, other: Linear, times: int = 1) -> Linear:
        terms = {
            v: self.terms.get(v, 0) + times * other.terms.get(v, 0)
            for v in {**self.terms, **other.terms}
        }
        return Linear(terms, self.constant + times * other.constant)

    def times(self, number: int) -> Linear:
        return Linear({v: k * number for v, k in self.terms.items()}, self.constant * number)

    @property
    def number(self) -> int | None:
        """The integer that it is everywhere."""
        return self.constant if not self.terms and isinstance(self.constant, int) else None


ZERO = Linear({})


@dataclasses.dataclass(frozen=True)
class Term:
    """`nonnegative` and `zero` of a Linear; `and`, `or`, `not`; `where`; `read`: (node, indices);
    `same`: (node, indices, indices), two elements of one tensor that are equal. A term that would
    be too large raises TooLarge: where a graph reads one value twice, its tree may be exponentially
    larger than the graph.
    """

    op: str
    args: tuple

    def __post_init__(self):
        size = 1 + sum(x.size for x in self.args if isinstance(x, Term))
        if size > LONGEST:
            raise TooLarge
        object.__setattr__(self, "size", size)

    @functools.cached_property
    def known_hash(self) -> int:
        return hash((self.op, self.args))

    @functools.cached_property
    def opposite(self):
        return opposite(self)

    def __hash__(self):
        return self.known_hash


def negated(t):
    return not t if isinstance(t, bool) else t.opposite


def opposite(t: Term):
    match t.op:
        case "nonnegative":
            return Term("nonnegative", (t.args[0].times(-1).plus(Linear({}, -1)),))
        case "not":
            return t.args[0]
        case "and":
            return disjunction(*map(negated, t.args))
        case "or":
            return conjunction(*map(negated, t.args))
    return Term("not", (t,))


def conjunction(x, y):
    if isinstance(x, bool):
        return y if x else False
    if isinstance(y, bool):
        return x if y else False
    return x if x == y else False if x == negated(y) else Term("and", (x, y))


def disjunction(x, y):
    if isinstance(x, bool):
        return True if x else y
    if isinstance(y, bool):
        return True if y else x
    return x if x == y else True if x == negated(y) else Term("or", (x, y))


def where(condition, x, y):
    """x where the condition holds; of booleans a condition again."""
    if isinstance(condition, bool):
        return x if condition else y
    if x == y and type(x) is type(y):
        return x
    if is_condition(x) and is_condition(y):
        # |a| <= b, chosen by the sign of a
        if implied(condition, y) and implied(negated(condition), x):
            return conjunction(x, y)
        return disjunction(conjunction(condition, x), conjunction(negated(condition), y))
    return Term("where", (condition, x, y))


def implied(condition, t) -> bool:
    """If one linear form is not negative, is the other one not negative either?"""
    if not all(isinstance(c, Term) and c.op == "nonnegative" for c in (condition, t)):
        return False
    apart = t.args[0].plus(condition.args[0], -1)
    return not apart.terms and statically_known_true(apart.constant >= 0)


def is_condition(t) -> bool:
    """Is it known to be a boolean? A `read` is one if its node is."""
    if isinstance(t, Term):
        return t.op not in ("where", "read") or (
            t.op == "read" and t.args[0].meta["val"].dtype == torch.bool
        )
    return isinstance(t, bool)


def lifted(function, *operands, steps: int = 6):
    """A function of values, some of which depend on a condition; None where the function has no
    answer.
    """
    for i, t in enumerate(operands):
        if not isinstance(t, Term) or t.op != "where":
            continue
        if not steps:
            raise TooLarge
        condition, x, y = t.args
        results = [
            lifted(function, *operands[:i], z, *operands[i + 1 :], steps=steps - 1) for z in (x, y)
        ]
        return None if None in results else where(condition, *results)
    return function(*operands)


def leaves(t) -> list:
    """The values that a term may have, whatever its conditions."""
    return opened(t, lambda x: x.args[1:] if x.op == "where" else None)


def conjuncts(t) -> list:
    return opened(t, lambda x: x.args if x.op == "and" else None)


def opened(t, inside) -> list:
    """The term taken apart, in order, where `inside` gives what to put in its place."""
    found, pending = [], [t]
    while pending:
        x = pending.pop()
        operands = inside(x) if isinstance(x, Term) else None
        if operands is None:
            found.append(x)
        else:
            pending += reversed(operands)
    return found


def parts(t) -> list:
    """The term and all terms and linear forms in it."""
    found, pending = [], [t]
    while pending:
        x = pending.pop()
        found.append(x)
        if isinstance(x, Term):
            reads = x.op in ("read", "same")
            pending += reversed([i for indices in x.args[1:] for i in indices] if reads else x.args)
    return found


def variables(t) -> set[str]:
    return {v for p in parts(t) if isinstance(p, Linear) for v in p.terms}


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number that a tensor of this dtype holds."""
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def number_of(t) -> float | None:
    """A number as a float: exact, or None."""
    if isinstance(t, (bool, float)):
        return float(t)
    number = t.number if isinstance(t, Linear) else None
    return float(number) if number is not None and abs(number) < 1 << 24 else None


class Ranges:
    """The ranges of index variables: each is at least 0 and less than its size."""

    def __init__(self, sizes: dict[str, object]):
        self.sizes = sizes

    def extreme(self, form: Linear, sign: int):
        """The least value of sign · form over all indices."""
        least = sign * form.constant
        for v, k in form.terms.items():
            least = least + min(sign * k, 0) * (self.sizes[v] - 1)
        return least

    def is_nonnegative(self, form: Linear) -> bool | None:
        """True or False where one holds everywhere."""
        if statically_known_true(self.extreme(form, 1) >= 0):
            return True
        return False if statically_known_true(self.extreme(form, -1) > 0) else None

    def nonnegative(self, form: Linear):
        known = self.is_nonnegative(form)
        return Term("nonnegative", (form,)) if known is None else known

    def zero(self, form: Linear):
        if not form.terms and statically_known_true(form.constant == 0):
            return True
        apart = any(statically_known_true(self.extreme(form, sign) > 0) for sign in (1, -1))
        return False if apart else Term("zero", (form,))


def compared(ranges: Ranges, op: str, x, y):
    """x op y of two numbers; None where neither their linear forms nor their values decide it."""
    if isinstance(x, Linear) and isinstance(y, float) and y.is_integer() and abs(y) < 1 << 24:
        y = Linear({}, int(y))
    if isinstance(x, Linear) and isinstance(y, Linear):
        apart, one = x.plus(y, -1), Linear({}, -1)
        differences = {
            "ge": apart,
            "gt": apart.plus(one),
            "le": apart.times(-1),
            "lt": apart.times(-1).plus(one),
        }
        return (
            ranges.nonnegative(differences[op])
            if op in differences
            else equal(ranges.zero(apart), op)
        )
    if isinstance(x, float) and isinstance(y, float):
        if math.isnan(x) or math.isnan(y):
            return None
        return {"ge": x >= y, "gt": x > y, "le": x <= y, "lt": x < y, "eq": x == y, "ne": x != y}[
            op
        ]
    alike = (
        isinstance(x, Term)
        and isinstance(y, Term)
        and x.op == y.op == "read"
        and x.args[0] is y.args[0]
    )
    if alike and op in ("eq", "ne") and not x.args[0].meta["val"].is_floating_point():
        return equal(x == y or Term("same", (x.args[0], x.args[1], y.args[1])), op)
    return None


def equal(t, op: str):
    return t if op == "eq" else negated(t)


def computed(t, sizes: dict[str, int], value, number=int) -> torch.Tensor:
    """The term for all index variables, one dimension each. `value(node)` gives the tensor that a
    `read` reads, `number(size)` what a symbolic size is.
    """
    names = list(sizes)

    def grid(form: Linear) -> torch.Tensor:
        out = torch.tensor(number(form.constant))
        for v, k in form.terms.items():
            out = out + (k * torch.arange(sizes[v])).view(
                [sizes[v] if name == v else 1 for name in names]
            )
        return out

    def read(node, at) -> torch.Tensor:
        whole = value(node)
        # of branches not taken
        indices = [grid(i).clamp(0, size - 1) for i, size in zip(at, whole.shape, strict=True)]
        return whole[tuple(indices)] if indices else whole

    def walk(x) -> torch.Tensor:
        if isinstance(x, Linear):
            return grid(x)
        if not isinstance(x, Term):
            return torch.tensor(x)
        match x.op:
            case "nonnegative":
                return grid(x.args[0]) >= 0
            case "zero":
                return grid(x.args[0]) == 0
            case "and":
                return walk(x.args[0]) & walk(x.args[1])
            case "or":
                return walk(x.args[0]) | walk(x.args[1])
            case "not":
                return ~walk(x.args[0])
            case "where":
                return torch.where(*map(walk, x.args))
            case "read":
                return read(*x.args)
        node, left, right = x.args
        return read(node, left) == read(node, right)

    out = walk(t)
    return out.view((1,) * (len(names) - out.dim()) + tuple(out.shape))
