"""A call of a graph under one contender: the forward, and in training the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.foreign_code.problems import INFER, Graph, cast

INDUCTOR, FUSION, AUTOTUNED = "inductor", "fusion", "max-autotune"
# The twin of each contender: the same code, for which Inductor chooses the configurations of its
# kernels once more.
TWINS = {INDUCTOR: "inductor-again", FUSION: "fusion-again"}


def contenders(
    options: dict, max_autotune: bool = False
) -> dict[str, Callable[[Callable], Callable]]:
    """What each makes of a function. Inductor comes first: ours are compared with it."""

    def compiled(**how) -> Callable[[Callable], Callable]:
        return lambda fn: torch.compile(fn, dynamic=False, **how)

    found = {INDUCTOR: compiled(), FUSION: compiled(backend="fusion", options=options)}
    return found | (
        {AUTOTUNED: compiled(mode="max-autotune-no-cudagraphs")} if max_autotune else {}
    )


def entry(module: nn.Module, name: str) -> Callable:
    """A function that calls the module. Dynamo keeps compiled code by code object: each contender
    has its own, so that none looks through the other's.
    """

    def forward(*args):
        return module(*args)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_{name}")
    return forward


class Step:
    """A graph on a device. Called with a function and inputs it gives the outputs and, in training,
    the gradients of parameters and activations, None where nothing depends on one.
    """

    def __init__(self, graph: Graph, size: str, device: torch.device):
        self.train, self.random = graph.mode != INFER, graph.random
        self.module, self.inputs = graph.build(size, device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        outs = listed(self.module(*self.inputs))
        self.outputs, self.dtypes = len(outs), [out.dtype for out in outs]
        self.dys: list[Tensor] = []
        if self.train:
            self.dys = [torch.randn_like(out) for out in outs if out.requires_grad]
            self.dtypes += [x.dtype for x in self.wanted(self.inputs)]

    def wanted(self, inputs: list) -> list[Tensor]:
        return [*self.parameters, *(x for x in inputs if isinstance(x, Tensor) and x.requires_grad)]

    def __call__(self, forward: Callable, inputs: list) -> list[Tensor | None]:
        outs = listed(forward(*inputs))
        if not self.train:
            return outs
        reached = [out for out in outs if out.requires_grad]
        return outs + list(
            torch.autograd.grad(reached, self.wanted(inputs), self.dys, allow_unused=True)
        )

    def fresh(self) -> list:
        """The inputs again, in other memory."""
        return [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in self.inputs
        ]

    def exact(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Eager results of the same numbers in another dtype."""
        wide = copy.copy(self)
        wide.module = copy.deepcopy(self.module).to(dtype)
        wide.parameters = [p for p in wide.module.parameters() if p.requires_grad]
        wide.dys = [dy.to(dtype) for dy in self.dys]
        inputs = [cast(x, dtype) for x in self.inputs]
        found = wide(wide.module, inputs)
        return [x if x is None else x.detach() for x in found]


def listed(out) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]
