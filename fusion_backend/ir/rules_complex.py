"""Complex numbers as pairs of real ones, for products that turn neighbours, as rotary position
embedding writes them: view_as_real(view_as_complex(x) · turns).

A complex value is no operator of a pattern: what is taken from it is expressed by its real and its
imaginary part. Only complex64 is, because a cast to or from fp64 is never ignored.
"""

from __future__ import annotations

import torch

from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import rule
from fusion_backend.ir.rules_shape import is_pairs, whole
from fusion_backend.ir.schema_args import Call


@rule("aten::view_as_complex")
def pairs_as_complex(c: Builder, call: Call, self: Expr):
    """Neighbours, [..., n, 2], as the two parts of a number."""
    if call.dtype != torch.complex64:
        return None
    if (self.op, self.attr) == ("stack", -1):
        return c.make("complex", self.args, None, call.shape)
    x = whole(c, self) if is_pairs(self) else None
    if x is None:
        return None
    parts = (c.make("every_other", (x,), (-1, k), call.shape) for k in (0, 1))
    return c.make("complex", parts, None, call.shape)


@rule("aten::complex")
def made_of_parts(c: Builder, call: Call, real: Expr, imag: Expr):
    if call.dtype != torch.complex64:
        return None
    return c.make("complex", (real, imag), None, call.shape)


@rule("aten::view_as_real")
def complex_as_pairs(c: Builder, call: Call, self: Expr):
    found = parts(c, self, call.shape[:-1])
    return None if found is None else c.make("stack", found, -1, call.shape)


@rule("aten::real", "aten::imag")
def part_of_complex(c: Builder, call: Call, self: Expr):
    found = parts(c, self, call.shape)
    return None if found is None else found[call.name == "imag"]


def parts(c: Builder, e: Expr, shape) -> tuple[Expr, Expr] | None:
    """The real and the imaginary part of a product of two complex numbers, or of one that is made
    of its parts.
    """
    if e.op == "complex":
        return e.args
    if e.op != "mul" or not all(map(is_complex, e.args)):
        return None
    (a, b), (p, q) = (x.args if x.op == "complex" else parts_of_tensor(c, x) for x in e.args)

    def sum_of(x: Expr, y: Expr, z: Expr, w: Expr, minus: bool = False) -> Expr:
        last = c.mul(z, w, shape)
        return c.add(c.mul(x, y, shape), c.neg(last, shape) if minus else last, shape)

    return sum_of(a, p, b, q, minus=True), sum_of(a, q, b, p)


def is_complex(e: Expr) -> bool:
    value = e.nodes[0].meta["val"] if e.nodes else None
    tensor = isinstance(value, torch.Tensor) and value.dtype == torch.complex64
    return e.op == "complex" or tensor


def parts_of_tensor(c: Builder, e: Expr) -> tuple[Expr, Expr]:
    """Views of a complex tensor; there may be no nodes for them."""
    real, imag = (c.make(op, (e,), None, e.shape) for op in ("real", "imag"))
    return real, imag
