"""Batch normalisation in training, in the view: what it computes, and what it then writes to the
running statistics. In the graph of the user it stays one call, unless a site is accepted.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusion_backend.capture.aliases import storages_of

SIGNATURE = inspect.signature(F.batch_norm)


def running_statistics(n: fx.Node) -> list[fx.Node]:
    """The running mean and variance that the call of a batch norm in training writes to; none for
    any other call.
    """
    if n.op != "call_function" or n.target is not F.batch_norm:
        return []
    given = given_arguments(n.args, n.kwargs)
    both = [given["running_mean"], given["running_var"]]
    known = type(given["momentum"]) in (int, float) and type(given["training"]) is bool
    if not known or not given["training"] or not all(isinstance(t, fx.Node) for t in both):
        return []
    memory = [storages_of(t.meta.get("example_value")) for t in both]
    return both if memory[0].isdisjoint(memory[1]) else []  # they are written to in turns


def given_arguments(args: tuple, kwargs: dict) -> dict:
    """The arguments of F.batch_norm by name, with its defaults."""
    call = SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def in_parts(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None,
    bias: Tensor | None, training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """F.batch_norm in training. The statistics are rounded once, when they are written to."""
    fast = torch.backends.cudnn.enabled
    y = torch.batch_norm(input, weight, bias, None, None, True, 0.0, eps, fast)
    var, mean = statistics(input)
    count = input.numel() // input.shape[1]
    unbiased = var.detach() * (count / (count - 1))
    for running, new in ((running_mean, mean.detach()), (running_var, unbiased)):
        running.copy_(running.to(new.dtype) * (1 - momentum) + new * momentum)
    return y


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """var and mean `[c]` of x `[b, c, ...]` over all dimensions but the second, in fp32 or fp64."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
