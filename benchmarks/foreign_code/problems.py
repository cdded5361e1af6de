"""What a problem is, and how the files of this package register theirs.

A problem is a function that takes sizes and returns (module, inputs). Its factories are called
under `torch.device(...)` and in fp32; `Graph.build` casts the floating tensors to the dtype of the
graph. Inputs made by `features` are activations, whose gradients a training step computes; all
others (labels, masks, positions) have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

INFER, TRAIN = "infer", "train"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}  # of the graphs that are listed
BUILT = DTYPES | {"f16": torch.float16}
SIZES = ("full", "tiny")
BOTH = "infer bf16, train bf16"
BOTH_F32 = "infer f32, train f32"
INFERENCE = "infer f32, infer bf16"
TRAINING = "train f32, train bf16"
ALL = "infer f32, infer bf16, train bf16"


@dataclasses.dataclass(frozen=True)
class Problem:
    """`source` names the public code whose shapes and style it has; `full` sizes are for a GPU,
    `tiny` ones for a CPU. random: it draws numbers in training, so that results differ by call.
    """

    name: str
    family: str
    source: str
    make: Callable[..., tuple[nn.Module, tuple]]
    full: dict[str, int]
    tiny: dict[str, int]
    graphs: tuple[tuple[str, str], ...]
    random: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """A problem in a mode ("infer" or "train") and a dtype ("f32" or "bf16")."""

    problem: Problem
    mode: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.problem.name} {self.mode} {self.dtype}"

    @property
    def random(self) -> bool:
        return self.problem.random and self.mode == TRAIN

    def build(self, size: str, device: torch.device) -> tuple[nn.Module, list]:
        """The module and its inputs on a device, with the same numbers every time."""
        torch.manual_seed(0)
        with torch.device(device):
            module, inputs = self.problem.make(**getattr(self.problem, size))
            settle(module)
        dtype = BUILT[self.dtype]
        return module.to(dtype).train(self.mode == TRAIN), [cast(x, dtype) for x in inputs]


PROBLEMS: dict[str, Problem] = {}


def problem(
    source: str, full: dict[str, int], tiny: dict[str, int], graphs: str = BOTH, random=False
):
    """Registers the function below it under its name, in the family of its file."""

    def register(make: Callable) -> Callable:
        name, family = make.__name__, make.__module__.rpartition(".")[2]
        if name in PROBLEMS:
            raise ValueError(f"two problems are called {name}")
        listed = tuple(tuple(graph.split()) for graph in graphs.split(", "))
        PROBLEMS[name] = Problem(name, family, source, make, full, tiny, listed, random)
        return make

    return register


def features(*shape: int) -> Tensor:
    """Activations: normal random numbers, whose gradient a training step computes."""
    return torch.randn(*shape, requires_grad=True)


def cast(x, dtype: torch.dtype):
    """A floating tensor in another dtype, still a leaf; anything else as it is."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def settle(module: nn.Module) -> None:
    """Running statistics as after training: those of a new batch norm would change nothing."""
    for part in module.modules():
        if getattr(part, "running_var", None) is not None:
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)


class Called(nn.Module):
    """A function as a module, with the parts and parameters that it reads from its first argument.

    Called(lambda m, x: m.norm(x) * m.scale, norm=nn.LayerNorm(8), scale=nn.Parameter(...))
    """

    def __init__(self, fn: Callable, **parts):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.fn(self, *args)
