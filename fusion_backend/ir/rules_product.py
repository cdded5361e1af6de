"""Rules of matrix products."""

from __future__ import annotations

import string

import torch

from fusion_backend.capture.sizes import equals
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import rule
from fusion_backend.ir.schema_args import Call

Number = int | float


@rule("aten::linear")
def linear(c: Builder, call: Call, input: Expr, weight: Expr, bias: Expr | None):
    return c.linear(input, weight, bias, call.shape)


@rule("aten::matmul")
def matmul(c: Builder, call: Call, self: Expr, other: Expr):
    """Of integers converted to int32 it is exact, and the same as the product that takes int8."""
    if all(e.op == "convert" and e.attr == torch.int32 for e in (self, other)):
        return c.make("int_matmul", (self.args[0], other.args[0]), None, call.shape)
    return c.make("matmul", (self, other), None, call.shape)


@rule("aten::mm", "aten::bmm")
def mm(c: Builder, call: Call, self: Expr, mat2: Expr):
    return matmul(c, call, self, mat2)


@rule("aten::_int_mm")
def int_mm(c: Builder, call: Call, self: Expr, mat2: Expr):
    return c.make("int_matmul", (self, mat2), None, call.shape)


@rule("aten::addmm")
def addmm(c: Builder, call: Call, self: Expr, mat1: Expr, mat2: Expr, beta: Number, alpha: Number):
    """beta · self + alpha · mat1 @ mat2; without self where beta is 0."""
    product = c.scale(c.make("matmul", (mat1, mat2), None, call.shape), alpha, call.shape)
    if equals(beta, 0):
        return product
    return c.add(product, c.scale(self, beta, call.shape), call.shape)


@rule("aten::baddbmm")
def baddbmm(
    c: Builder, call: Call, self: Expr, batch1: Expr, batch2: Expr, beta: Number, alpha: Number
):
    return addmm(c, call, self, batch1, batch2, beta, alpha)


@rule("aten::einsum")
def einsum(c: Builder, call: Call, equation: str, tensors: list[Expr]):
    """Products over one index of two operands: of matrices with any batch, bhqd,bhkd->bhqk, or of
    rows with a matrix, ...k,kn->...n, in either order.
    """
    terms = indices_of(equation, tensors)
    if terms is None:
        return None
    (left, right, out), (x, y) = terms, tensors
    if not any(i in left and i in right for i in out):
        # The operand of the rows comes first; of two matrices, the one whose columns come last in
        # the result comes second.
        if len(left) == 2 and (len(right) > 2 or out[-1] in left):
            left, right, x, y = right, left, y, x
    batch = [i for i in out if i in left and i in right]
    rows, columns = ([i for i in out if i in e and i not in batch] for e in (left, right))
    summed = [i for i in left if i in right and i not in out]
    if len(columns) != 1 or len(summed) != 1 or not rows or (batch and len(rows) > 1):
        return None
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))
    if not batch and not equals(x.shape[left.index(summed[0])], sizes[summed[0]]):
        return None

    def ordered(e: Expr, have: str | list, want: list) -> Expr:
        return c.permute(e, [have.index(i) for i in want], tuple(sizes[i] for i in want))

    x, y = ordered(x, left, batch + rows + summed), ordered(y, right, batch + summed + columns)
    product = c.make("matmul", (x, y), None, tuple(sizes[i] for i in batch + rows + columns))
    return ordered(product, batch + rows + columns, list(out))


def indices_of(equation: str, tensors: list[Expr]) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, those of one operand's ellipsis among them;
    None where a letter is repeated, or is in one of the three alone.
    """
    operands, arrow, out = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2 or len(tensors) != 2:
        return None
    if "..." in operands:
        if operands.count("...") > 1 or "..." not in out:
            return None
        k = int("..." in terms[1])
        more = len(tensors[k].shape) - len(terms[k]) + 3
        unused = [i for i in string.ascii_letters if i not in equation]
        letters = "".join(unused[:more])
        terms[k], out = terms[k].replace("...", letters), out.replace("...", letters)
    used = "".join((*terms, out))
    if any(len({*term}) < len(term) for term in (*terms, out)) or not used.isalpha():
        return None
    return None if any(used.count(i) == 1 for i in used) else (*terms, out)
