"""A step of a model under one contender."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.subjects.subject import Subject

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
Compile = Callable[[Callable], Callable]  # what a contender makes of a function


def contenders(
    gate: str = "auto", max_autotune: bool = False, verify: bool = False, measure_s: float = 20.0
) -> dict[str, Compile]:
    def compiled(**how) -> Compile:
        return lambda step: torch.compile(step, dynamic=False, **how)

    found = {"eager": lambda step: step, "inductor": compiled()}
    if max_autotune:
        found["max-autotune"] = compiled(mode="max-autotune-no-cudagraphs")
    options = {"fusion.gate": gate, "fusion.verify": verify, "fusion.measure_s": measure_s}
    return found | {"fusion": compiled(backend="fusion", options=options)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """train: a step has a backward, and with an optimizer ("sgd", "adamw") its step. cold: how many
    times to compile with an empty cache; warm: compile again with a filled one. exact: the dtype of
    the run that errors are against, None for none. rounds: turns of each contender, of at least
    least_ms each. profile: look at kernels; trace: the folder of their traces. keep_answers: put
    what the gate measured into the user's store.
    """

    train: bool = False
    optimizer: str | None = None
    cold: int = 1
    warm: bool = True
    exact: torch.dtype | None = torch.float64
    rounds: int = 11
    least_ms: float = 50
    profile: bool = True
    trace: Path | None = None
    keep_answers: bool = False


class Step:
    """A step of the subject under one contender."""

    def __init__(self, subject: Subject, make: Compile, plan: Plan):
        self.subject, self.plan = subject, plan
        model, result = subject.model, subject.result  # what Dynamo sees: no Step, no Subject

        def forward(*args, **kwargs):
            return result(model(*args, **kwargs))

        self.forward = make(forward)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = (
            optimizer(plan.optimizer, self.parameters) if plan.train and plan.optimizer else None
        )

    def __call__(self) -> object:
        """The output; a training step leaves the gradients in the parameters."""
        if self.subject.before:
            self.subject.before()
        if not self.plan.train:
            with torch.no_grad():
                return self.forward(*self.subject.args, **self.subject.kwargs)
        for p in self.parameters:
            p.grad = None
        loss = self.forward(*self.subject.args, **self.subject.kwargs)
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: p.grad for name, p in self.subject.model.named_parameters() if p.grad is not None
        }


def optimizer(kind: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """With a learning rate of zero it does its work and leaves the weights, so that all contenders
    see the same.
    """
    fused = parameters[0].device.type == "cuda" or None
    make = {"sgd": functools.partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}[
        kind
    ]
    return make(parameters, lr=0.0, fused=fused)


def clear_gradients(subject: Subject) -> None:
    for p in subject.model.parameters():
        p.grad = None
