"""Rules of arithmetic, elementwise functions, choices, casts and numbers."""

from __future__ import annotations

import torch

from fusion_backend.capture.sizes import equals, hashable
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr, is_const
from fusion_backend.ir.operator_families import CASTS, FILLED_LIKE, SAME_VALUE, aten
from fusion_backend.ir.rules import composite, rule
from fusion_backend.ir.schema_args import Call

Number = int | float


# x + alpha · y; subtraction is the addition of −1 · y.


@rule("aten::add")
def add(c: Builder, call: Call, self: Expr, other: Expr, alpha: Number):
    return c.add(self, c.scale(other, alpha, call.shape), call.shape)


@rule("aten::sub")
def sub(c: Builder, call: Call, self: Expr, other: Expr, alpha: Number):
    return c.add(self, c.neg(c.scale(other, alpha, call.shape), call.shape), call.shape)


@rule("aten::rsub")
def rsub(c: Builder, call: Call, self: Expr, other: Expr, alpha: Number):
    return sub(c, call, other, self, alpha)


@rule("aten::neg")
def neg(c: Builder, call: Call, self: Expr):
    return c.neg(self, call.shape)


# Products, quotients and powers.


@rule("aten::mul")
def mul(c: Builder, call: Call, self: Expr, other: Expr):
    return c.mul(self, other, call.shape)


@rule("aten::addcmul")
def addcmul(c: Builder, call: Call, self: Expr, tensor1: Expr, tensor2: Expr, value: Number):
    product = c.mul(tensor1, tensor2, call.shape)
    return c.add(self, c.scale(product, value, call.shape), call.shape)


@rule("aten::div")
def div(c: Builder, call: Call, self: Expr, other: Expr, rounding_mode: str | None = None):
    return None if rounding_mode else c.div(self, other, call.shape)


@rule("aten::reciprocal")
def reciprocal(c: Builder, call: Call, self: Expr):
    return c.div(c.const(1.0), self, call.shape)


@rule("aten::pow")
def power(c: Builder, call: Call, self: Expr, exponent: Number | torch.Tensor):
    return None if isinstance(exponent, torch.Tensor) else c.power(self, exponent, call.shape)


@rule("aten::square")
def square(c: Builder, call: Call, self: Expr):
    return c.mul(self, self, call.shape)


@composite("div")
def reciprocal_root(c: Builder, x: Expr, y: Expr, shape):
    """x / √y = x · rsqrt(y)"""
    return c.mul(x, c.make("rsqrt", y.args, None, y.shape), shape) if y.op == "sqrt" else None


@composite("div")
def sigmoid_by_hand(c: Builder, x: Expr, y: Expr, shape):
    """x / (1 + exp(−a)) = x · sigmoid(a). Of 1 + exp(k · a) it is sigmoid(−k · a)."""
    e, one = sorted(y.args, key=is_const) if y.op == "add" else (y, y)
    if not is_const(one) or one.attr != 1.0 or e.op != "exp" or e.args[0].op != "mul":
        return None
    inner, minus = sorted(e.args[0].args, key=is_const)
    if not is_const(minus):
        return None
    inner = c.mul(inner, c.const(-minus.attr), e.args[0].shape)
    sigmoid = c.make("sigmoid", (inner,), None, y.shape)
    return sigmoid if is_const(x) and x.attr == 1.0 else c.mul(x, sigmoid, shape)


# Elementwise functions.


@rule(*aten("sqrt", "rsqrt", "exp", "sigmoid", "abs", "erf", "tanh"))
def function(c: Builder, call: Call, self: Expr):
    return c.make(call.name, (self,), None, call.shape)


@rule("aten::round")
def rounded(c: Builder, call: Call, self: Expr, decimals: int = 0):
    return None if decimals else c.make("round", (self,), None, call.shape)


@rule("aten::softplus")
def softplus(c: Builder, call: Call, self: Expr, beta: Number, threshold: Number):
    return c.make("softplus", (self,), (float(beta), float(threshold)), call.shape)


@rule("aten::mish")
def mish(c: Builder, call: Call, self: Expr):
    bent = c.make("softplus", (self,), (1.0, 20.0), call.shape)
    return c.mul(self, c.make("tanh", (bent,), None, call.shape), call.shape)


@rule("aten::silu")
def silu(c: Builder, call: Call, self: Expr):
    return c.mul(self, c.make("sigmoid", (self,), None, call.shape), call.shape)


@rule("aten::gelu")
def gelu(c: Builder, call: Call, self: Expr, approximate: str):
    return c.make("gelu", (self,), approximate, call.shape)


# Minimum and maximum: clamp, relu and hardtanh are made of these two.


@rule(*aten("maximum", "max"))
def maximum(c: Builder, call: Call, self: Expr, other: Expr):
    return c.maximum(self, other, call.shape)


@rule(*aten("minimum", "min"))
def minimum(c: Builder, call: Call, self: Expr, other: Expr):
    return c.elementwise("minimum", self, other, shape=call.shape)


@rule("aten::clamp")
def clamp(c: Builder, call: Call, self: Expr, min: Expr | None, max: Expr | None):
    return c.clamp(self, min, max, call.shape)


@rule("aten::clamp_min")
def clamp_min(c: Builder, call: Call, self: Expr, min: Expr):
    return c.maximum(self, min, call.shape)


@rule("aten::clamp_max")
def clamp_max(c: Builder, call: Call, self: Expr, max: Expr):
    return c.clamp(self, None, max, call.shape)


@rule("aten::relu")
def relu(c: Builder, call: Call, self: Expr):
    return c.clamp(self, c.const(0.0), None, call.shape)


@rule("aten::hardtanh")
def hardtanh(c: Builder, call: Call, self: Expr, min_val: Expr, max_val: Expr):
    return c.clamp(self, min_val, max_val, call.shape)


@rule("aten::relu6")
def relu6(c: Builder, call: Call, self: Expr):
    return c.clamp(self, c.const(0.0), c.const(6.0), call.shape)


@rule("aten::hardsigmoid")
def hardsigmoid(c: Builder, call: Call, self: Expr):
    """relu6(x + 3) / 6"""
    shifted = c.add(self, c.const(3.0), call.shape)
    return c.div(relu6(c, call, shifted), c.const(6.0), call.shape)


@rule("aten::hardswish")
def hardswish(c: Builder, call: Call, self: Expr):
    """x · relu6(x + 3) / 6"""
    bent = relu6(c, call, c.add(self, c.const(3.0), call.shape))
    return c.div(c.mul(self, bent, call.shape), c.const(6.0), call.shape)


# Choice by a mask: where(not m, x, y) is where(m, y, x).


def choice(c: Builder, mask: Expr, x: Expr, y: Expr, shape) -> Expr:
    while mask.op == "not":
        mask, x, y = mask.args[0], y, x
    return c.make("where", (mask, x, y), None, shape)


@rule("aten::where")
def where(c: Builder, call: Call, condition: Expr, self: Expr, other: Expr):
    return choice(c, condition, self, other, call.shape)


@rule("aten::masked_fill")
def masked_fill(c: Builder, call: Call, self: Expr, mask: Expr, value: Expr):
    return choice(c, mask, value, self, call.shape)


@rule(*aten("bitwise_not", "logical_not"))
def negated(c: Builder, call: Call, self: Expr):
    if call.dtype != torch.bool:
        return None
    return self.args[0] if self.op == "not" else c.make("not", (self,), None, call.shape)


# The same value, in another dtype or not.


@rule(*SAME_VALUE)
def same_value(c: Builder, call: Call, self: Expr):
    return self


@rule(*CASTS)
def cast(c: Builder, call: Call, self: Expr):
    source, target = call["self"], call.value
    if source.device != target.device or source.layout != target.layout:
        return None
    return c.cast(self, source.dtype, target.dtype, call.shape)


@rule("aten::dropout")
def dropout(c: Builder, call: Call, input: Expr, p: float, train: bool):
    """Every draw is a different value: the name of the node distinguishes it, and the matcher does
    not compare the names.
    """
    if not train or equals(p, 0):
        return input
    return c.make("dropout", (input, c.const(p)), call.node.name, call.shape)


# Numbers in tensors.


def held(number: float, dtype: torch.dtype) -> float:
    """The number that a tensor of this dtype holds; one in fp32 stands for itself."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    return torch.tensor(number, dtype=dtype).item() if whole or dtype.itemsize < 4 else number


def number_in_tensor(c: Builder, call: Call, number):
    if call.shape != () or not isinstance(number, (int, float)) or call.dtype == torch.bool:
        return None
    return c.const(held(number, call.dtype))


@rule("aten::full")
def full(c: Builder, call: Call, fill_value: Number):
    return number_in_tensor(c, call, fill_value)


@rule("aten::scalar_tensor")
def scalar_tensor(c: Builder, call: Call, s: Number):
    return number_in_tensor(c, call, s)


@rule(*aten(*FILLED_LIKE))
def filled_like(c: Builder, call: Call):
    if call.dtype != call["self"].dtype:
        return None
    number = c.const(FILLED_LIKE[call.name])
    return c.make("expand", (number,), hashable(call.shape), call.shape)
