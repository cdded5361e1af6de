"""Rules for elements that an operand has at other indices, and for sums and differences along a
dimension.

The rules are those of element_rules.py, continued.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.ir.operator_families import (
    EXPANSIONS,
    PERMUTATIONS,
    RESHAPES,
    SAME_VALUE,
    SLICES,
    aten,
    permutation,
    slice_of,
)
from fusion_backend.ir.schema_args import Call
from fusion_backend.masks.element_rules import (
    Indices,
    Size,
    arithmetic,
    difference,
    rule,
)
from fusion_backend.masks.reader import INTEGERS, Element, Reader, dtype_of, is_one
from fusion_backend.masks.terms import ZERO, Linear, lifted, where

# Sums and differences along a dimension.


def dimension(call: Call, dim: int) -> int:
    """Of `self`, counted from the left."""
    return dim % max(call["self"].dim(), 1)


@rule("aten::diff")
def differences(
    r: Reader,
    call: Call,
    at: Indices,
    self: fx.Node,
    n: int,
    dim: int,
    prepend: fx.Node | None,
    append: fx.Node | None,
):
    """x[k] - x[k - 1]; what is prepended stands before x[0]."""
    dim = dimension(call, dim)
    if n != 1 or append is not None or call.dtype not in INTEGERS:
        return None

    def shifted(by: int):
        return r.element(self, (*at[:dim], at[dim].plus(Linear({}, by)), *at[dim + 1 :]))

    if prepend is None:
        return arithmetic(call, difference, shifted(1), shifted(0))
    if not is_one(prepend.meta["val"].shape[dim]):
        return None
    first = r.element(prepend, (*at[:dim], ZERO, *at[dim + 1 :]))
    earlier = where(r.ranges.zero(at[dim]), first, shifted(-1))
    return lifted(lambda x, y: difference(call.dtype, x, y), shifted(0), earlier)


@rule("aten::cumsum")
def running_sum(r: Reader, call: Call, at: Indices, self: fx.Node, dim: int):
    """Of one number everywhere."""
    dim = dimension(call, dim)
    along = r.variable(call.node, call.value.shape[dim])
    x = r.element(self, (*at[:dim], along, *at[dim + 1 :]))
    number = Linear({}, int(x)) if isinstance(x, bool) else x
    if not isinstance(number, Linear) or number.number is None or call.dtype not in INTEGERS:
        return None
    return at[dim].plus(Linear({}, 1)).times(number.number)


# Elements of the operand at the same indices, or at others.


@rule(*SAME_VALUE, *aten("detach", "lift_fresh", "positive"))
def same_element(r: Reader, call: Call, at: Indices, self: fx.Node):
    return r.element(self, at)


@rule(*EXPANSIONS)
def expanded(r: Reader, call: Call, at: Indices, self: Element):
    return self


@rule("aten::repeat")
def repeated(r: Reader, call: Call, at: Indices, self: Element, repeats: list[int]):
    """Only if elements are repeated along dimensions of size 1, or not at all."""
    source = call["self"].shape
    steps = list(zip(source, repeats[len(repeats) - len(source) :], strict=True))
    done = all(is_one(size) or (isinstance(k, int) and k == 1) for size, k in steps)
    return self if done else None


@rule("aten::unsqueeze")
def unsqueezed(r: Reader, call: Call, at: Indices, self: fx.Node, dim: int):
    dim %= len(at)
    return r.element(self, at[:dim] + at[dim + 1 :])


@rule(*RESHAPES, "aten::squeeze")
def reshaped(r: Reader, call: Call, at: Indices, self: fx.Node):
    """Only if the reshape adds and removes dimensions of size 1 alone."""
    source = call["self"].shape
    if call["self"].dtype != call.dtype:
        return None
    pairs = [(i, size) for i, size in zip(at, call.shape, strict=True) if not is_one(size)]
    if not same(tuple(s for _, s in pairs), tuple(s for s in source if not is_one(s))):
        return None
    rest = iter(pairs)
    return r.element(self, tuple(ZERO if is_one(size) else next(rest)[0] for size in source))


@rule(*PERMUTATIONS)
def permuted(r: Reader, call: Call, at: Indices, self: fx.Node):
    order = permutation(call)
    return r.element(self, tuple(at[order.index(d)] for d in range(len(at))))


def moved(r: Reader, call: Call, at: Indices, self: fx.Node, dim: int, start: Size, step: int = 1):
    """The element `start` further along a dimension; a negative start counts from the end."""
    size = call["self"].shape[dim]
    if not statically_known_true(start >= 0):
        if not statically_known_true(start < 0) or not statically_known_true(size + start >= 0):
            return None
        start = start + size
    index = at[dim].times(step).plus(Linear({}, start))
    return r.element(self, (*at[:dim], index, *at[dim + 1 :]))


@rule(*SLICES)
def sliced(r: Reader, call: Call, at: Indices, self: fx.Node):
    taken = slice_of(call)
    if taken is None or not isinstance(taken.step, int):
        return None
    return moved(r, call, at, self, taken.dim, taken.start, taken.step)


@rule("aten::select")
def selected(r: Reader, call: Call, at: Indices, self: fx.Node, dim: int, index: Size):
    if not isinstance(index, (int, torch.SymInt)):
        return None
    dim = dimension(call, dim)
    return moved(r, call, (*at[:dim], ZERO, *at[dim:]), self, dim, index)


@rule("aten::flip")
def flipped(r: Reader, call: Call, at: Indices, self: fx.Node, dims: list[int]):
    dims, shape = [d % len(at) for d in dims], call.shape
    indices = [
        i.times(-1).plus(Linear({}, shape[d] - 1)) if d in dims else i for d, i in enumerate(at)
    ]
    return r.element(self, tuple(indices))


@rule("aten::index")
def indexed(r: Reader, call: Call, at: Indices, self: fx.Node, indices: list[fx.Node]):
    """x[rows, columns] with tensors of indices that broadcast against each other."""
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(dtype_of(indices[d]) not in INTEGERS for d in given):
        return None
    rank = max(indices[d].meta["val"].dim() for d in given)
    adjacent = given == list(range(given[0], given[-1] + 1))
    first = given[0] if adjacent else 0
    between, rest = at[first : first + rank], iter(at[:first] + at[first + rank :])
    found = []
    for d, size in enumerate(call["self"].shape):
        index = r.operand(indices[d], between) if d in given else next(rest)
        if not isinstance(index, Linear):
            return None
        from_start = True if d not in given else r.ranges.is_nonnegative(index)
        if from_start is None:
            return None
        found.append(index if from_start else index.plus(Linear({}, size)))
    return r.element(self, tuple(found))
