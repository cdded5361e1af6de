"""What an operator's element is, made of the elements of its operands. One line a rule.

A rule gets the reader `r`, the node's arguments `a` and the place `at`, one Linear a dimension, and
returns a term, or None where it does not apply.
"""

from __future__ import annotations

import torch

from fusion_backend.capture.sizes import same
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.masks.reader import FLOATS, INTEGERS, Arguments, Reader, dtype_of, is_one
from fusion_backend.masks.terms import (
    ZERO,
    Linear,
    Term,
    both,
    compared,
    either,
    is_condition,
    lifted,
    negated,
    number_of,
    rounded,
    where,
)

# Numbers.


def as_dtype(t, dtype: torch.dtype):
    """A value as an element of another dtype."""

    def convert(x):
        if isinstance(x, Term):
            return None
        if dtype in INTEGERS:
            return (
                x if isinstance(x, Linear) else Linear({}, int(x)) if isinstance(x, bool) else None
            )
        number = number_of(x)
        return None if number is None or dtype not in FLOATS else rounded(number, dtype)

    if dtype == torch.bool:
        return t if is_condition(t) else None
    return lifted(
        convert, Term("where", (t, True, False)) if is_condition(t) and isinstance(t, Term) else t
    )


def truth(r: Reader, t):
    """t as a boolean: is it not zero?"""

    def nonzero(x):
        if is_condition(x):
            return x
        return (
            negated(r.ranges.zero(x))
            if isinstance(x, Linear)
            else x != 0
            if isinstance(x, float)
            else None
        )

    return None if t is None else lifted(nonzero, t)


def cast(r, a, at):
    x = r.operand(a["self"], at)
    return truth(r, x) if a.val.dtype == torch.bool else as_dtype(x, a.val.dtype)


def constant(number):
    """A tensor of one number; `number(a)` says which."""

    def rule(r, a, at):
        value = r.operand(number(a), ())
        return truth(r, value) if a.val.dtype == torch.bool else as_dtype(value, a.val.dtype)

    return rule


def arange(r, a, at):
    start, step = a.number("start", 0), a.number("step", 1)
    if (
        a.val.dtype not in INTEGERS
        or not isinstance(step, int)
        or not isinstance(start, (int, torch.SymInt))
    ):
        return None
    return at[0].times(step).plus(Linear({}, start))


def arithmetic(function):
    """Of integers exactly; of floats as the dtype rounds."""

    def rule(r, a, at):
        dtype = a.val.dtype
        if a["alpha"] not in (None, 1):
            return None
        values = [r.operand(a[name], at) for name in ("self", "other") if name in a.values]
        if dtype == torch.bool or None in values:
            return both(*values) if function is product and all(map(is_condition, values)) else None
        values = [as_dtype(v, dtype) for v in values]
        return None if None in values else lifted(lambda *x: function(dtype, *x), *values)

    return rule


def total(dtype, x, y, sign: int = 1):
    if isinstance(x, Linear) and isinstance(y, Linear):
        return x.plus(y, sign)
    return rounded(x + sign * y, dtype) if isinstance(x, float) and isinstance(y, float) else None


def product(dtype, x, y):
    if isinstance(x, Linear) and isinstance(y, Linear):
        x, y = (x, y) if y.number is not None else (y, x)
        return None if y.number is None else x.times(y.number)
    return rounded(x * y, dtype) if isinstance(x, float) and isinstance(y, float) else None


def magnitude(r, a, at):
    def size(x):
        return where(r.ranges.nonnegative(x), x, x.times(-1)) if isinstance(x, Linear) else None

    return lifted(size, r.element(a["self"], at)) if a.val.dtype in INTEGERS else None


def comparison(op: str):
    def rule(r, a, at):
        x, y = r.operand(a["self"], at), r.operand(a["other"], at)
        types = [dtype_of(a[name]) for name in ("self", "other")]
        floats = {t for t in types if t is not None and t.is_floating_point}
        if len(floats) > 1:
            return None
        # what is compared; a float against integers as it is
        dtype = floats.pop() if floats else torch.int64
        x, y = (as_dtype(v, dtype) if is_condition(v) or dtype in FLOATS else v for v in (x, y))
        return None if None in (x, y) else lifted(lambda x, y: compared(r.ranges, op, x, y), x, y)

    return rule


def logical(function):
    """Of booleans; the logical_ operators take numbers too."""

    def rule(r, a, at):
        values = [r.operand(a[name], at) for name in ("self", "other") if name in a.values]
        if a.val.dtype != torch.bool or None in values:
            return None
        values = [truth(r, v) if "logical" in str(a.node.target) else v for v in values]
        return function(*values) if all(map(is_condition, values)) else None

    return rule


def chosen(names: tuple[str, str, str]):
    """One of two values; `names` are those of the condition and of the values."""

    def rule(r, a, at):
        condition, *values = (r.operand(a[name], at) for name in names)
        if not is_condition(condition) or None in values:
            return None
        values = [
            truth(r, v) if a.val.dtype == torch.bool else as_dtype(v, a.val.dtype) for v in values
        ]
        return None if None in values else where(condition, *values)

    return rule


# Places.


def same_element(r, a, at):
    return r.element(a["self"], at)


def expanded(r, a, at):
    return r.operand(a["self"], at)


def repeated(r, a, at):
    """Where it is done along dimensions of size 1, or not at all."""
    source, times = a["self"].meta["val"].shape, a["repeats"]
    steps = list(zip(source, times[len(times) - len(source) :], strict=True))
    done = all(is_one(size) or (isinstance(k, int) and k == 1) for size, k in steps)
    return r.operand(a["self"], at) if done else None


def unsqueezed(r, a, at):
    dim = a.number("dim") % a.val.dim()
    return r.element(a["self"], at[:dim] + at[dim + 1 :])


def reshaped(r, a, at):
    """Where dimensions of size 1 come and go, and no others."""
    shape, source = a.val.shape, a["self"].meta["val"].shape
    if dtype_of(a["self"]) != a.val.dtype:
        return None
    places = [(i, size) for i, size in zip(at, shape, strict=True) if not is_one(size)]
    if not same(tuple(s for _, s in places), tuple(s for s in source if not is_one(s))):
        return None
    rest = iter(places)
    return r.element(a["self"], tuple(ZERO if is_one(size) else next(rest)[0] for size in source))


def permuted(order):
    """`order(a, rank)` gives for each dimension of the result the one of the source."""

    def rule(r, a, at):
        dims = order(a, len(at))
        return r.element(a["self"], tuple(at[dims.index(d)] for d in range(len(at))))

    return rule


def swapped(a, rank: int) -> list[int]:
    i, j = (a.number(name) % rank for name in ("dim0", "dim1"))
    order = list(range(rank))
    order[i], order[j] = order[j], order[i]
    return order


def moved(r: Reader, a: Arguments, at, dim: int, start, step: int = 1):
    """The element `start` further along a dimension; a negative start counts from the end."""
    size = a["self"].meta["val"].shape[dim]
    if not statically_known_true(start >= 0):
        if not statically_known_true(start < 0) or not statically_known_true(size + start >= 0):
            return None
        start = start + size
    place = at[dim].times(step).plus(Linear({}, start)) if dim < len(at) else Linear({}, start)
    return r.element(a["self"], (*at[:dim], place, *at[dim + 1 :]))


def sliced(r, a, at):
    step = a.number("step", 1)
    return (
        moved(r, a, at, a.dim("dim", 0), a.number("start") or 0, step)
        if isinstance(step, int)
        else None
    )


def narrowed(r, a, at):
    start = a.number("start")
    return moved(r, a, at, a.dim("dim"), start) if isinstance(start, (int, torch.SymInt)) else None


def selected(r, a, at):
    dim, index = a.dim("dim"), a.number("index")
    return (
        moved(r, a, (*at[:dim], ZERO, *at[dim:]), dim, index)
        if isinstance(index, (int, torch.SymInt))
        else None
    )


def flipped(r, a, at):
    dims, shape = [d % len(at) for d in a["dims"]], a.val.shape
    turned = [
        i.times(-1).plus(Linear({}, shape[d] - 1)) if d in dims else i for d, i in enumerate(at)
    ]
    return r.element(a["self"], tuple(turned))


def indexed(r, a, at):
    """x[rows, columns] with tensors of places that broadcast against each other."""
    x, indices = a["self"], list(a["indices"])
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(dtype_of(indices[d]) not in INTEGERS for d in given):
        return None
    rank = max(indices[d].meta["val"].dim() for d in given)
    together = given == list(range(given[0], given[-1] + 1))
    first = given[0] if together else 0
    between, rest = at[first : first + rank], iter(at[:first] + at[first + rank :])
    places = []
    for d, size in enumerate(x.meta["val"].shape):
        if d not in given:
            places.append(next(rest))
            continue
        place = r.operand(indices[d], between)
        if not isinstance(place, Linear):
            return None
        from_start = r.ranges.is_nonnegative(place)
        if from_start is None:
            return None
        places.append(place if from_start else place.plus(Linear({}, size)))
    return r.element(x, tuple(places))


def difference(r, a, at):
    """x[k] - x[k - 1]; what is prepended stands before x[0]."""
    before, dim = a["prepend"], a.dim("dim", -1)
    if a.number("n", 1) != 1 or a["append"] is not None or a.val.dtype not in INTEGERS:
        return None

    def there(shift: int):
        return r.element(a["self"], (*at[:dim], at[dim].plus(Linear({}, shift)), *at[dim + 1 :]))

    if before is None:
        return lifted(lambda x, y: total(a.val.dtype, x, y, -1), there(1), there(0))
    if not is_one(before.meta["val"].shape[dim]):
        return None
    earlier = where(
        r.ranges.zero(at[dim]), r.element(before, (*at[:dim], ZERO, *at[dim + 1 :])), there(-1)
    )
    return lifted(lambda x, y: total(a.val.dtype, x, y, -1), there(0), earlier)


def running_sum(r, a, at):
    """Of one number everywhere."""
    dim = a.dim("dim")
    fresh = f"t{len(r.ranges.sizes)}"
    r.ranges.sizes[fresh] = a.val.shape[dim]
    x = r.element(a["self"], (*at[:dim], Linear({fresh: 1}), *at[dim + 1 :]))
    number = Linear({}, int(x)) if isinstance(x, bool) else x
    if not isinstance(number, Linear) or number.number is None or a.val.dtype not in INTEGERS:
        return None
    return at[dim].plus(Linear({}, 1)).times(number.number)


def triangle(lower: bool):
    def rule(r, a, at):
        diagonal = a.number("diagonal", 0)
        apart = at[-2].plus(at[-1], -1).plus(Linear({}, diagonal))  # row - column + diagonal
        inside = r.ranges.nonnegative(apart if lower else apart.times(-1))
        x = r.element(a["self"], at)
        zero = False if a.val.dtype == torch.bool else as_dtype(Linear({}, 0), a.val.dtype)
        return None if zero is None else where(inside, x, zero)

    return rule


def exclusive(x, y):
    return where(x, negated(y), y)


RULES = {
    # made of nothing
    "aten::arange": arange,
    "aten::zeros": constant(lambda a: 0),
    "aten::zeros_like": constant(lambda a: 0),
    "aten::new_zeros": constant(lambda a: 0),
    "aten::ones": constant(lambda a: 1),
    "aten::ones_like": constant(lambda a: 1),
    "aten::new_ones": constant(lambda a: 1),
    "aten::full": constant(lambda a: a["fill_value"]),
    "aten::full_like": constant(lambda a: a["fill_value"]),
    "aten::new_full": constant(lambda a: a["fill_value"]),
    "aten::scalar_tensor": constant(lambda a: a["s"]),
    # numbers
    "aten::add": arithmetic(total),
    "aten::sub": arithmetic(lambda dtype, x, y: total(dtype, x, y, -1)),
    "aten::rsub": arithmetic(lambda dtype, x, y: total(dtype, y, x, -1)),
    "aten::mul": arithmetic(product),
    "aten::abs": magnitude,
    "aten::neg": arithmetic(lambda dtype, x: x.times(-1) if isinstance(x, Linear) else -x),
    # conditions
    **{f"aten::{op}": comparison(op) for op in ("le", "lt", "ge", "gt", "eq", "ne")},
    **{f"aten::{op}": comparison(name) for op, name in (
        ("less", "lt"), ("less_equal", "le"), ("greater", "gt"), ("greater_equal", "ge"),
        ("not_equal", "ne"))},
    **{f"aten::{op}": logical(both) for op in ("bitwise_and", "__and__", "logical_and")},
    **{f"aten::{op}": logical(either) for op in ("bitwise_or", "__or__", "logical_or")},
    **{f"aten::{op}": logical(exclusive) for op in ("bitwise_xor", "__xor__", "logical_xor")},
    **{f"aten::{op}": logical(negated) for op in ("bitwise_not", "logical_not")},
    "aten::where": chosen(("condition", "self", "other")),
    "aten::masked_fill": chosen(("mask", "value", "self")),
    "aten::tril": triangle(True),
    "aten::triu": triangle(False),
    # sums along a dimension
    "aten::diff": difference,
    "aten::cumsum": running_sum,
    # the same values
    **{f"aten::{op}": same_element for op in ("clone", "contiguous", "alias", "detach",
    "lift_fresh", "positive")},
    **{f"aten::{op}": cast for op in ("to", "_to_copy", "type_as")},
    # places
    **{f"aten::{op}": expanded for op in ("expand", "expand_as", "broadcast_to")},
    "aten::repeat": repeated,
    "aten::unsqueeze": unsqueezed,
    **{f"aten::{op}": reshaped for op in ("view", "view_as", "_unsafe_view", "reshape", "squeeze",
    "flatten")},
    "aten::permute": permuted(lambda a, rank: [d % rank for d in a["dims"]]),
    "aten::transpose": permuted(swapped),
    **{f"aten::{op}": permuted(lambda a, rank: list(range(rank))[::-1]) for op in ("t", "numpy_T")},
    "aten::mT": permuted(lambda a, rank: [*range(rank - 2), rank - 1, rank - 2]),
    "aten::slice": sliced,
    "aten::narrow": narrowed,
    "aten::select": selected,
    "aten::flip": flipped,
    "aten::index": indexed,
}  # fmt: skip
