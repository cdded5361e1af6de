"""Rules for numbers and conditions whose elements depend on the operands' elements at the same
indices.

A rule gets the reader `r`, the `Call`, the indices `at`, one Linear a dimension, and the operator's
arguments by name: an `Element` where operands broadcast, else what the graph holds. It returns a
term, or None where it does not apply.
"""

from __future__ import annotations

import torch

from fusion_backend.capture.sizes import equals
from fusion_backend.ir.operator_families import CASTS, aten
from fusion_backend.ir.schema_args import Call
from fusion_backend.masks.reader import ELEMENTS, FLOATS, INTEGERS, Element, Reader, dtype_of
from fusion_backend.masks.terms import (
    Linear,
    Term,
    compared,
    conjunction,
    disjunction,
    is_condition,
    lifted,
    negated,
    number_of,
    rounded,
    where,
)

rule = ELEMENTS.register
Indices = tuple[Linear, ...]
Size = int | torch.SymInt

# Numbers.


def as_dtype(t, dtype: torch.dtype):
    """A value as an element of another dtype."""

    def convert(x):
        if isinstance(x, Term):
            return None
        if dtype in INTEGERS:
            if isinstance(x, bool):
                return Linear({}, int(x))
            return x if isinstance(x, Linear) else None
        number = number_of(x)
        return None if number is None or dtype not in FLOATS else rounded(number, dtype)

    if dtype == torch.bool:
        return t if is_condition(t) else None
    choice = is_condition(t) and isinstance(t, Term)
    return lifted(convert, Term("where", (t, True, False)) if choice else t)


def truth(r: Reader, t):
    """t as a boolean: is it not zero?"""

    def nonzero(x):
        if is_condition(x):
            return x
        if isinstance(x, Linear):
            return negated(r.ranges.zero(x))
        return x != 0 if isinstance(x, float) else None

    return None if t is None else lifted(nonzero, t)


def converted(r: Reader, t, dtype: torch.dtype):
    return truth(r, t) if dtype == torch.bool else as_dtype(t, dtype)


@rule(*CASTS)
def cast(r: Reader, call: Call, at: Indices, self: Element):
    return converted(r, self, call.dtype)


@rule(*aten("zeros", "zeros_like", "new_zeros"))
def zero(r: Reader, call: Call, at: Indices):
    return converted(r, Linear({}, 0), call.dtype)


@rule(*aten("ones", "ones_like", "new_ones"))
def one(r: Reader, call: Call, at: Indices):
    return converted(r, Linear({}, 1), call.dtype)


@rule(*aten("full", "full_like", "new_full"))
def full(r: Reader, call: Call, at: Indices, fill_value: Element):
    return converted(r, fill_value, call.dtype)


@rule("aten::scalar_tensor")
def scalar_tensor(r: Reader, call: Call, at: Indices, s: Element):
    return converted(r, s, call.dtype)


@rule("aten::arange")
def arange(r: Reader, call: Call, at: Indices, start: Size = 0, step: int = 1):
    sizes = isinstance(step, int) and isinstance(start, (int, torch.SymInt))
    if call.dtype not in INTEGERS or not sizes:
        return None
    return at[0].times(step).plus(Linear({}, start))


def arithmetic(call: Call, function, *values):
    """Of integers exactly; of floats as the dtype rounds."""
    dtype = call.dtype
    values = [as_dtype(v, dtype) for v in values]
    if dtype == torch.bool or None in values:
        return None
    return lifted(lambda *x: function(dtype, *x), *values)


def total(dtype, x, y, sign: int = 1):
    if isinstance(x, Linear) and isinstance(y, Linear):
        return x.plus(y, sign)
    return rounded(x + sign * y, dtype) if isinstance(x, float) and isinstance(y, float) else None


def difference(dtype, x, y):
    return total(dtype, x, y, -1)


def product(dtype, x, y):
    if isinstance(x, Linear) and isinstance(y, Linear):
        x, y = (x, y) if y.number is not None else (y, x)
        return None if y.number is None else x.times(y.number)
    return rounded(x * y, dtype) if isinstance(x, float) and isinstance(y, float) else None


@rule("aten::add")
def add(r: Reader, call: Call, at: Indices, self: Element, other: Element, alpha: Size):
    return arithmetic(call, total, self, other) if equals(alpha, 1) else None


@rule("aten::sub")
def sub(r: Reader, call: Call, at: Indices, self: Element, other: Element, alpha: Size):
    return arithmetic(call, difference, self, other) if equals(alpha, 1) else None


@rule("aten::rsub")
def rsub(r: Reader, call: Call, at: Indices, self: Element, other: Element, alpha: Size):
    return sub(r, call, at, other, self, alpha)


@rule("aten::mul")
def mul(r: Reader, call: Call, at: Indices, self: Element, other: Element):
    if call.dtype == torch.bool:
        return conjunction(self, other) if is_condition(self) and is_condition(other) else None
    return arithmetic(call, product, self, other)


@rule("aten::neg")
def neg(r: Reader, call: Call, at: Indices, self: Element):
    return arithmetic(call, lambda dtype, x: x.times(-1) if isinstance(x, Linear) else -x, self)


@rule("aten::abs")
def magnitude(r: Reader, call: Call, at: Indices, self: Element):
    def size(x):
        return where(r.ranges.nonnegative(x), x, x.times(-1)) if isinstance(x, Linear) else None

    return lifted(size, self) if call.dtype in INTEGERS else None


# Conditions.


@rule(*aten("le", "lt", "ge", "gt", "eq", "ne"))
def comparison(r: Reader, call: Call, at: Indices, self: Element, other: Element):
    types = [dtype_of(call[name]) for name in ("self", "other")]
    floats = {t for t in types if t is not None and t.is_floating_point}
    if len(floats) > 1:
        return None
    # what is compared; a float against integers as it is
    dtype = floats.pop() if floats else torch.int64
    values = [
        as_dtype(v, dtype) if is_condition(v) or dtype in FLOATS else v for v in (self, other)
    ]
    if None in values:
        return None
    return lifted(lambda x, y: compared(r.ranges, call.name, x, y), *values)


def exclusive(x, y):
    return where(x, negated(y), y)


CONNECTIVES = {"and": conjunction, "or": disjunction, "xor": exclusive}


def condition(r: Reader, call: Call, t):
    """An operand of a logical operator; the logical_ operators take numbers too."""
    t = truth(r, t) if call.name.startswith("logical") else t
    return t if is_condition(t) and call.dtype == torch.bool else None


@rule(*(f"aten::{of}_{name}" for of in ("bitwise", "logical") for name in CONNECTIVES))
def connective(r: Reader, call: Call, at: Indices, self: Element, other: Element):
    values = condition(r, call, self), condition(r, call, other)
    return None if None in values else CONNECTIVES[call.name.partition("_")[2]](*values)


@rule(*aten("bitwise_not", "logical_not"))
def complement(r: Reader, call: Call, at: Indices, self: Element):
    found = condition(r, call, self)
    return None if found is None else negated(found)


def choice(r: Reader, call: Call, mask, *values):
    values = [converted(r, v, call.dtype) for v in values]
    return None if None in values or not is_condition(mask) else where(mask, *values)


@rule("aten::where")
def where_rule(
    r: Reader, call: Call, at: Indices, condition: Element, self: Element, other: Element
):
    return choice(r, call, condition, self, other)


@rule("aten::masked_fill")
def masked_fill(r: Reader, call: Call, at: Indices, self: Element, mask: Element, value: Element):
    return choice(r, call, mask, value, self)


@rule(*aten("tril", "triu"))
def triangle(r: Reader, call: Call, at: Indices, self: Element, diagonal: int):
    apart = at[-2].plus(at[-1], -1).plus(Linear({}, diagonal))  # row - column + diagonal
    inside = r.ranges.nonnegative(apart if call.name == "tril" else apart.times(-1))
    nothing = False if call.dtype == torch.bool else as_dtype(Linear({}, 0), call.dtype)
    return None if nothing is None else where(inside, self, nothing)
