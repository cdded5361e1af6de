"""Rules of losses over rows of logits [..., v] and flattened targets."""

from __future__ import annotations

import torch

from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import rule
from fusion_backend.ir.rules_shape import of_rows
from fusion_backend.ir.schema_args import Call

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def loss(c: Builder, call: Call, logits: Expr, target: Expr, ignore_index, smoothing):
    if call["self"].dim() != 2 or call["target"].dtype != torch.int64:
        return None
    if call["weight"] is not None:
        return None
    numbers = (c.const(ignore_index), c.const(smoothing))
    operands = (of_rows(c, logits), target, *numbers)
    return c.make("cross_entropy", operands, REDUCTIONS[call["reduction"]], call.shape)


@rule("aten::cross_entropy_loss")
def cross_entropy(
    c: Builder, call: Call, self: Expr, target: Expr, ignore_index: int, label_smoothing: float
):
    return loss(c, call, self, target, ignore_index, label_smoothing)


@rule("aten::nll_loss", "aten::nll_loss_nd")
def negative_log_likelihood(c: Builder, call: Call, self: Expr, target: Expr, ignore_index: int):
    if self.op != "log_softmax" or self.attr != -1:
        return None
    return loss(c, call, self.args[0], target, ignore_index, 0.0)


@rule("aten::log_softmax")
def log_softmax(c: Builder, call: Call, self: Expr, dim: int, dtype: torch.dtype | None):
    if not call.shape:  # of a single number
        return None
    if dtype is not None:
        self = c.cast(self, call["self"].dtype, dtype, call.shape)
    rank = len(call.shape)
    return c.make("log_softmax", (self,), dim % rank - rank, call.shape)
