"""Rules of the order and shape of dimensions: permutations, reshapes, slices, joined tensors."""

from __future__ import annotations

import torch

from fusion_backend.capture.attention import MARK
from fusion_backend.capture.sizes import equals, hashable, same
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import LOOKED_THROUGH, NUMBERS, Expr, peel
from fusion_backend.ir.heads import splits, weights_times_values
from fusion_backend.ir.operator_families import (
    EXPANSIONS,
    PERMUTATIONS,
    RESHAPES,
    SLICES,
    permutation,
    slice_of,
)
from fusion_backend.ir.rules import rule
from fusion_backend.ir.schema_args import Call
from fusion_backend.ir.scores import with_heads, without_sink
from fusion_backend.ir.windows import added_windows, repeated_windows

NESTED = 4  # products in the weight of a product
# What a value of each row goes through before it is spread over the row again.
ELEMENTWISE = {"add", "mul", "div", "maximum", "minimum", "sqrt", "rsqrt", "pow", "cast"}


@rule(*PERMUTATIONS)
def permuted(c: Builder, call: Call, self: Expr):
    return c.permute(self, permutation(call), call.shape)


@rule(*EXPANSIONS)
def expanded(c: Builder, call: Call, self: Expr):
    if same(self.shape, call.shape):
        return self
    return c.make("expand", (self,), hashable(call.shape), call.shape)


@rule("aten::masked_scatter")
def scattered(c: Builder, call: Call, self: Expr, mask: Expr, source: Expr):
    """A mask of whole rows is expanded anyway; the rest is left unchanged."""
    mask = mask.args[0] if mask.op == "expand" else mask
    if mask.op != "unsqueeze" or mask.attr != -1 or not same(self.shape, call.shape):
        return None
    return c.make("scatter_rows", (self, mask.args[0], source), None, call.shape)


@rule("aten::unsqueeze")
def unsqueezed(c: Builder, call: Call, self: Expr, dim: int):
    rank = len(call.shape)
    axis = dim % rank - rank
    if (kept := with_dimension(c, self, axis, {})) is not None:
        return kept
    if MARK in call.node.meta:
        return with_heads(c, self, (*call.shape[:2],))
    return c.make("unsqueeze", (self,), axis, call.shape)


def with_dimension(
    c: Builder, e: Expr, axis: int, found: dict[Expr, Expr | None], depth: int = 0
) -> Expr | None:
    """A value with a dimension of size 1, if it was computed without, elementwise, from values that
    had it: rsqrt(squeeze(m) + eps) as rsqrt(m + eps). None if anything else is read.
    """
    if e.op == "squeeze" and e.attr == (axis,):
        return e.args[0]
    if e.op in NUMBERS:
        return e
    if e.op not in ELEMENTWISE or e.shape is None or e.state != c.state or depth > LOOKED_THROUGH:
        return None
    if e not in found:
        args = [with_dimension(c, a, axis, found, depth + 1) for a in e.args]
        place = len(e.shape) + 1 + axis
        known = None not in args and place >= 0 and any(a.op not in NUMBERS for a in args)
        shape = (*e.shape[:place], 1, *e.shape[place:]) if known else None
        found[e] = c.make(e.op, args, e.attr, shape) if known else None
    return found[e]


@rule("aten::squeeze")
def squeezed(c: Builder, call: Call, self: Expr, dim: int | list[int]):
    if not isinstance(dim, int) or self.shape is None:
        return None
    axis = (dim % max(len(self.shape), 1)) - len(self.shape)
    if len(self.shape) == len(call.shape):  # not of size 1: nothing happens
        return self
    if self.op == "unsqueeze" and self.attr == axis:
        return self.args[0]
    return c.make("squeeze", (self,), (axis,), call.shape)


# Reshapes with another meaning: rows of a tensor, repeated heads, interleaved pairs.


@rule(*RESHAPES)
def reshaped(c: Builder, call: Call, self: Expr):
    x, shape = self, call.shape
    while x.op in ("view", "rows"):  # a view of a view
        x = x.args[0]
    if same(x.shape, shape):
        return x
    if x.shape is None or not shape:
        return c.make("view", (x,), str(shape), shape)
    if weights_times_values(x) and splits(x.shape, shape):
        return with_heads(c, x, shape[:2])
    ways = (outside_product, as_repeated, as_interleaved, added_windows, repeated_windows)
    found = next(filter(None, (way(c, x, shape) for way in ways)), None)
    if found is None and len(shape) == 2 and same(x.shape[-1:], shape[-1:]):
        return c.make("rows", (x,), None, shape)
    return found or c.make("view", (x,), str(shape), shape)


def of_rows(c: Builder, x: Expr) -> Expr:
    """The tensor that was flattened to rows; a cast of the rows, as autocast inserts, is a cast of
    the tensor.
    """
    passed = []
    while x.peeled.op == "rows" and (x, c.state) not in c.flattened:
        passed.append(x)
        x = x.args[0]
    inner = c.flattened.get((x, c.state), x)
    for e in reversed(passed):
        if e.op == "cast":
            inner = c.make("cast", (inner,), e.attr, inner.shape)
            inner.rows = e
        c.flattened[e, c.state] = inner
    return inner


def outside_product(c: Builder, x: Expr, shape) -> Expr | None:
    """x seen as rows, times a weight (plus a bias, or several), seen as x again: the product of x
    itself.
    """
    biases = []
    while x.op == "add" and len(biases) < LOOKED_THROUGH:
        pairs = [(y, b) for y, b in (x.args, x.args[::-1]) if b.shape and len(b.shape) == 1]
        if not pairs:
            return None
        x, b = pairs[0]
        biases.append(b)
    if x.op != "matmul" or not same(x.shape[-1:], shape[-1:]):
        return None
    inner = of_rows(c, x.args[0])
    if inner.shape is None or not same(inner.shape[:-1], shape[:-1]):
        return None
    product = c.make("matmul", (inner, x.args[1]), None, shape)
    for b in reversed(biases):
        product = c.add(product, b, shape)
    return product


def repeated(c: Builder, x: Expr, times, shape) -> Expr:
    """Heads repeated for grouped queries: [..., h, n, d] to [..., h · times, n, d]."""
    return c.make("repeat_heads", (x,), str(times), shape)


@rule("aten::repeat_interleave")
def repeat_interleaved(c: Builder, call: Call, self: Expr, repeats: int, dim: int | None):
    rank = len(call.shape)
    heads = rank and isinstance(repeats, int) and dim is not None and dim % rank == rank - 3
    return repeated(c, self, repeats, call.shape) if heads else None


def as_repeated(c: Builder, x: Expr, shape) -> Expr | None:
    """x[:, :, None].expand(b, h, times, n, d).reshape(b, h · times, n, d)"""
    if x.op != "expand" or x.args[0].op != "unsqueeze" or x.args[0].attr != -3:
        return None
    if len(shape) != len(x.shape) - 1:
        return None
    inner = x.args[0].args[0]
    others = (*inner.shape[:-3], *inner.shape[-2:])
    times = x.shape[-3]
    return repeated(c, inner, times, shape) if same(others, (*shape[:-3], *shape[-2:])) else None


def as_interleaved(c: Builder, x: Expr, shape) -> Expr | None:
    """stack((a, b), -1).flatten(-2): the elements of a and b by turns."""
    if x.op != "stack" or x.attr != -1 or len(x.args) != 2 or not same(x.shape[:-2], shape[:-1]):
        return None
    return c.make("interleave", x.args, None, shape)


@rule("aten::arange")
def counted(c: Builder, call: Call, start: int | float = 0, step: int | float = 1):
    """The start and step come first in the expression. A tensor of bytes as an index is a mask."""
    if call.dtype not in (torch.int64, torch.int32):
        return None
    rest = hashable(call.shape), call.dtype, call.value.device
    return c.make("arange", (), (hashable(start), hashable(step), *rest), call.shape)


# Parts of a dimension.


def part(c: Builder, x: Expr, dim: int, start, stop, step, shape, depth: int = NESTED) -> Expr:
    """A slice. The first and the second half of a dimension are distinguished from other slices, so
    that they do not depend on the size.
    """
    size = x.shape[dim]
    axis = dim - len(x.shape)
    in_product = axis == -1 and depth
    columns = part_of_product(c, x, start, stop, step, shape, depth) if in_product else None
    if columns is not None:
        return columns
    if axis == -1 and equals(step, 1) and (weights := without_sink(c, x, start, shape)):
        return weights
    if not all(isinstance(v, int) for v in (size, start, stop, step)):
        for k, bounds in enumerate(halves(size)) if equals(step, 1) else ():
            if same((start, stop), bounds):
                return c.make("half", (x,), (axis, k), shape)
        return c.make("slice", (x,), (axis, str(start), str(stop), str(step)), shape)
    if (start, stop, step) == (0, size, 1):
        return x
    if step == 1 and size % 2 == 0 and (start, stop) in halves(size):
        return c.make("half", (x,), (axis, 1 if start else 0), shape)
    if step == 2 and size % 2 == 0 and start in (0, 1) and stop == size:
        return c.make("every_other", (x,), (axis, start), shape)
    return c.make("slice", (x,), (axis, start, stop, step), shape)


def halves(size) -> tuple[tuple, tuple]:
    return (0, size // 2), (size // 2, size)


def part_of_product(c: Builder, x: Expr, start, stop, step, shape, depth: int) -> Expr | None:
    """Columns of x W + b are x times columns of W, plus those of b: packed weights are weights side
    by side.
    """
    if x.op == "matmul" and x.args[1].shape is not None and len(x.args[1].shape) == 2:
        rows = x.args[1].shape[0]
        columns = part(c, x.args[1], 1, start, stop, step, (rows, shape[-1]), depth - 1)
        return c.make("matmul", (x.args[0], columns), None, shape)
    for y, b in (x.args, x.args[::-1]) if x.op == "add" else ():
        if b.shape is not None and y.op == "matmul" and same(b.shape, x.shape[-1:]):
            y = part_of_product(c, y, start, stop, step, shape, depth)
            bias = part(c, b, 0, start, stop, step, (shape[-1],), depth - 1)
            return y and c.add(y, bias, shape)
    return None


@rule(*SLICES)
def sliced(c: Builder, call: Call, self: Expr):
    taken = slice_of(call) if self.shape else None
    return None if taken is None else part(c, self, *taken, call.shape)


@rule("aten::glu")
def glu(c: Builder, call: Call, self: Expr, dim: int):
    dim %= len(call.shape)
    size = call.shape[dim]
    up, gate = (part(c, self, dim, k * size, (k + 1) * size, 1, call.shape) for k in (0, 1))
    return c.mul(up, c.make("sigmoid", (gate,), None, call.shape), call.shape)


@rule("aten::chunk", "aten::split", "aten::split_with_sizes", "aten::tensor_split")
def pieces(c: Builder, call: Call, self: Expr, dim: int):
    """The pieces are slices, one after the other; those of tensor_split may overlap."""
    dim %= len(self.shape)
    shapes = [tuple(v.shape) for v in call.value]
    if not equals(sum(shape[dim] for shape in shapes), self.shape[dim]):
        return None
    if len(shapes) == 2 and same(*shapes):
        bounds = halves(self.shape[dim])
        return c.make("tuple", [part(c, self, dim, *b, 1, shapes[0]) for b in bounds])
    found, start = [], 0
    for shape in shapes:
        found.append(part(c, self, dim, start, start + shape[dim], 1, shape))
        start += shape[dim]
    return c.make("tuple", found)


def is_pairs(x: Expr) -> bool:
    """Is it a tensor seen as pairs of neighbours, [..., n, 2]?"""
    return x.op == "view" and same(x.shape[-1:], (2,))


def has_halves(x: Expr) -> bool:
    """Is it a tensor seen as its two halves, [..., 2, n]?"""
    return x.op == "view" and same(x.shape[-2:-1], (2,))


def whole(c: Builder, x: Expr) -> Expr | None:
    """The tensor [..., p · q] of which x is a view [..., p, q]. A view of a view is read as one of
    the first tensor, so the tensor may be another view of that; it must be in the graph.
    """
    if len(x.shape) < 2 or x.args[0].shape is None:
        return None
    shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    if same(x.args[0].shape, shape):
        return x.args[0]
    seen = c.make("view", x.args, str(shape), shape)
    return seen if seen.nodes else None


def half(c: Builder, x: Expr, k: int, shape) -> Expr:
    """The first or the second half of a tensor."""
    bounds = halves(x.shape[-1])[k]
    return part(c, x, len(x.shape) - 1, *bounds, 1, shape)


def one_of_two(c: Builder, self: Expr, axis: int, k: int, shape) -> Expr | None:
    """Every other element of what is seen as pairs, or a half of what is seen as its halves."""
    if axis == -2 and has_halves(self) and (x := whole(c, self)):
        return half(c, x, k, shape)
    if axis == -1 and is_pairs(self) and (x := whole(c, self)):
        return c.make("every_other", (x,), (-1, k), shape)
    return None


@rule("aten::select")
def selected(c: Builder, call: Call, self: Expr, dim: int, index: int):
    """x[:, None][:, 0] is x; of pairs it is every other element, of halves one of them."""
    if not self.shape or not isinstance(index, int):
        return None
    axis = dim % len(self.shape) - len(self.shape)
    if self.op == "unsqueeze" and self.attr == axis:
        return self.args[0]
    return one_of_two(c, self, axis, index % 2, call.shape)


@rule("aten::unbind")
def unbound(c: Builder, call: Call, self: Expr, dim: int):
    if not self.shape or not call.value:
        return None
    axis, shape = dim % len(self.shape) - len(self.shape), tuple(call.value[0].shape)
    found = [one_of_two(c, self, axis, k, shape) for k in (0, 1)]
    return None if None in found else c.make("tuple", found)


# Tensors joined.


@rule("aten::stack")
def stacked(c: Builder, call: Call, tensors: list[Expr], dim: int):
    axis = dim % len(call.shape) - len(call.shape)
    return c.make("stack", tensors, axis, call.shape)


@rule("aten::cat")
def joined(c: Builder, call: Call, tensors: list[Expr], dim: int):
    axis = dim % len(call.shape) - len(call.shape)
    if all(e.op == "unsqueeze" and e.attr == axis for e in tensors):
        return c.make("stack", (e.args[0] for e in tensors), axis, call.shape)
    return c.make("cat", tensors, axis, call.shape)


def over_channels(axis: int, shape) -> bool:
    """Is it dimension 1 of `[n, c, ...]`? One operator stands for tensors of any number of
    dimensions, which an axis counted from the right would tell apart.
    """
    return shape is not None and len(shape) >= 3 and axis == 1 - len(shape)


def undetached(e: Expr) -> Expr:
    """A value without a detach of it, and without the casts around either."""
    e = peel(e)
    return peel(e.args[0]) if e.op == "aten.detach.default" else e
