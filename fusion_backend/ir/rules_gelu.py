"""GELU by hand: x/2 · (1 + erf(x/√2)), and with tanh(√(2/π) (x + 0.044715 x³)).

It is a composite and not a spelling of the pattern `gelu`, because five patterns contain a gelu,
and each would need a spelling for every way to write the product of four factors.
"""

from __future__ import annotations

import math

from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, is_const, number_and_rest, peel
from fusion_backend.ir.rules import composite


def near(e: Expr, number: float) -> bool:
    """Is e this number, to within 2e-7? Constants of formulas are written with eight digits or
    more.
    """
    return is_const(e) and math.isclose(e.attr, number, rel_tol=2e-7)


@composite("mul")
def gelu_by_hand(c: Builder, p: Expr, q: Expr, shape):
    """Is p · q one of ½·x by 1 + f(x), x by ½·(1 + f(x)), or ½ by x·(1 + f(x))?"""
    for f, x in halved_products(p, q) + halved_products(q, p):
        one, bent = number_and_rest(peel(f)) if peel(f).op == "add" else (None, None)
        if one is None or not near(one, 1.0):
            continue
        bent = peel(bent)
        if bent.op == "erf" and is_multiple(bent.args[0], x, math.sqrt(0.5)):
            return c.make("gelu", (x,), "none", shape)
        if bent.op == "tanh" and is_tanh_argument(bent.args[0], x):
            return c.make("gelu", (x,), "tanh", shape)
    return None


def halved_products(p: Expr, q: Expr) -> list[tuple[Expr, Expr]]:
    """The ways of reading p · q as ½ · f · x."""
    if near(p, 0.5):
        return [q.args, q.args[::-1]] if q.op == "mul" else []
    number, rest = number_and_rest(p) if p.op == "mul" else (None, None)
    if number is None and p.op == "div" and near(p.args[1], 2.0):
        return [(q, p.args[0])]
    return [(rest, q), (q, rest)] if number is not None and near(number, 0.5) else []


def is_multiple(e: Expr, x: Expr, number: float) -> bool:
    """Is e number · x?"""
    e = peel(e)
    if e.op == "div":
        return peel(e.args[0]) is peel(x) and near(e.args[1], 1 / number)
    k, rest = number_and_rest(e) if e.op == "mul" else (None, None)
    return rest is not None and peel(rest) is peel(x) and near(k, number)


def factors_of(e: Expr, x: Expr, depth: int = 4) -> list[Expr]:
    """The operands of a product and of the products in it, without roundings. x is one operand,
    even if it is a product itself.
    """
    e = peel(e)
    if e is x or e.op != "mul" or not depth:
        return [e]
    return [f for a in e.args for f in factors_of(a, x, depth - 1)]


def is_tanh_argument(e: Expr, x: Expr) -> bool:
    """√(2/π) (x + 0.044715 x³), or √(2/π) x (1 + 0.044715 x²)."""
    x = peel(x)
    factors = factors_of(e, x)
    outer = [f for f in factors if is_const(f)]
    rest = [f for f in factors if not is_const(f) and f is not x]
    if (
        len(outer) != 1
        or not near(outer[0], math.sqrt(2 / math.pi))
        or len(rest) != 1
        or rest[0].op != "add"
    ):
        return False
    powers = 1 if x in factors else 0  # of x, outside the sum
    terms = [factors_of(t, x) for t in rest[0].args]
    terms.sort(key=lambda t: sum(not is_const(f) for f in t) if len(t) > 1 else 0)
    low, high = terms
    low_fine = len(low) == 1 and (near(low[0], 1.0) if powers else low[0] is x)
    k = [f for f in high if is_const(f)]
    exponents = [exponent_of(f, x) for f in high if not is_const(f)]
    return (
        low_fine
        and len(k) == 1
        and near(k[0], 0.044715)
        and None not in exponents
        and sum(exponents) == 3 - powers
    )


def exponent_of(f: Expr, x: Expr) -> int | None:
    """n where f is xⁿ, else None."""
    if f is x:
        return 1
    return int(f.attr) if f.op == "pow" and peel(f.args[0]) is x and f.attr in (2, 3) else None
