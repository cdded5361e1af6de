"""`fusion gate measure SPEC`: measure everything that can be measured in a model, for later
processes.
"""

from __future__ import annotations

import argparse
import sys

import torch

from fusion_backend.compat.torch import refusals_unlogged
from fusion_backend.frontends.commands.asked_model import asked_for
from fusion_backend.frontends.commands.explain import eager_error
from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.commands.gate_measured import HEAD, line
from fusion_backend.frontends.commands.gate_store import counted, opened
from fusion_backend.frontends.dynamo import fusion
from fusion_backend.frontends.own_model import OwnModel, where
from fusion_backend.measure.store import Answer
from fusion_backend.reporting.report import Report, report
from fusion_backend.reporting.text import IN_SHELL, terminal_width, text_of

NO_GPU = (
    "there is no CUDA GPU that torch can use: nothing can be measured (fusion doctor says more)"
)
WITHOUT_LOSS = "measured in inference, without the loss; --train measures the training step"


def measure(arguments: argparse.Namespace) -> None:
    """Compile the model with fusion.gate=measure, run it once, and print what was measured. Raises
    Failure.
    """
    device = gpu()
    held = opened(to_write=True)  # checked first, so that nothing is measured that cannot be kept
    made = asked_for(arguments, device)
    before, graphs = {a.key: a for a in held.all()}, len(report().graphs)
    compile_and_run(made, arguments.train)
    found = Report(report().graphs[graphs:])
    print(text_of(found, False, terminal_width(), IN_SHELL))
    print(f"\n{told(found, [a for a in held.all() if before.get(a.key) != a])}")
    print(f"folder: {held.folder}")
    if made.loss and not arguments.train:
        print(f"fusion gate measure: {WITHOUT_LOSS}", file=sys.stderr)


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise Failure(NO_GPU, 1)
    return torch.device("cuda")


def compile_and_run(made: OwnModel, train: bool) -> None:
    """Raises Failure with the model's own error, where it has one."""
    options = {"fusion.gate": "measure"}
    try:
        with torch.set_grad_enabled(train), refusals_unlogged():
            torch.compile(made.step(train), backend=fusion, options=options)(
                *made.args, **made.kwargs
            )
    except Exception as error:
        own = eager_error(made, train)
        if own is not None:
            raise Failure(
                f"{made.name} run on its inputs raised {where(own, made.build)}", 1
            ) from own
        raise Failure(f"{made.name} runs, compiled it raised {where(error)}", 1) from error


def told(found: Report, new: list[Answer]) -> str:
    """What was measured, and kept."""
    measured = sum(g.measured for g in found.graphs)
    seconds = sum(g.measure_s for g in found.graphs)
    if not measured:
        return "nothing was measured: all that could be is known already, or nothing was proposed"
    lines = [f"{counted(measured, 'kind')} of regions measured in {seconds:.1f} s"]
    undecided = measured - len(new)
    lines += [HEAD, *map(line, new)] if new else []
    if undecided > 0:
        lines.append(
            f"{undecided} without a certain answer, which is not kept; the report says why"
        )
    return "\n".join(lines)
