"""A whole model under several contenders: compile time, errors, step time, memory, kernels.

All contenders run the same weights on the same inputs in one process. One that fails is reported;
the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import tempfile

import torch

from benchmarks.measure.failures import said, until_it_fails
from benchmarks.measure.memory import peak_bytes
from benchmarks.measure.timing import noise, verdict
from benchmarks.measure.trace import profile
from benchmarks.measure.wall_time import whole_calls
from benchmarks.model_runs.compiling import compile_all, start_compilers
from benchmarks.model_runs.errors import compare_all
from benchmarks.model_runs.failing import failing, give_back
from benchmarks.model_runs.steps import Compile, Plan, Step, clear_gradients
from benchmarks.records.rows import FAILED, ModelContender, ModelRow, Spread
from benchmarks.subjects.subject import Subject
from fusion_backend.compat.torch import many_recompiles

AGAIN = "-again"
NOBODY_ELSE = contextlib.nullcontext()  # uses the GPU


def measure(
    subject: Subject,
    makes: dict[str, Compile],
    plan: Plan,
    row: ModelRow,
    device: torch.device,
    say=print,
    alone: contextlib.AbstractContextManager = NOBODY_ELSE,
) -> ModelRow:
    """Fill the row. `say` is told what goes on; what was compiled is timed inside of `alone`."""
    found = {name: ModelContender(name) for name in makes}
    row.contenders = list(found.values())
    folder = tempfile.mkdtemp(prefix="benchmark-cache-")
    try:
        with many_recompiles():
            start_compilers(makes, plan.train, device, f"{folder}/start")
            steps = {name: Step(subject, make, plan) for name, make in makes.items()}
            compile_all(steps, found, plan, device, folder, say)
            with alone:
                time_and_compare(subject, steps, found, row, device, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        clear_gradients(subject)
        torch.compiler.reset()  # compiled code holds on to the model
        give_back()
    return row


def time_and_compare(subject: Subject, steps: dict[str, Step], found, row, device, say) -> None:
    compare_all(subject, steps, found, row, say)
    alive = {name: step for name, step in steps.items() if found[name].status != FAILED}
    time_all(alive, found, row, device, say)
    for name, step in alive.items():
        if found[name].status == FAILED:
            continue
        say(f"{name}: memory and kernels")
        with failing(found[name]):
            look_inside(step, found[name], device, row)


def time_all(alive: dict[str, Step], found, row: ModelRow, device, say) -> None:
    if not alive:
        return
    twin = next(name for name in ("inductor", "eager", *alive) if name in alive)
    say(f"timing {', '.join(alive)} in turns")
    plan = alive[twin].plan
    runs = {name: until_it_fails(found[name], step) for name, step in alive.items()}
    runs[twin + AGAIN] = runs[twin]
    try:
        times = whole_calls(runs, device, plan.rounds, plan.least_ms)
    except Exception as error:  # none failed alone
        row.notes.append(f"not timed: {said(error)}")
        return
    timed = {name for name in alive if found[name].status != FAILED}
    for name in timed:
        found[name].step = Spread.of(times[name])
    if twin not in timed:
        return
    row.noise, row.twin = noise(found[twin].step, Spread.of(times[twin + AGAIN])), twin
    for name in timed - {"inductor"} if twin == "inductor" else ():
        found[name].verdict = verdict(found[name].step, found[twin].step, row.noise)


def look_inside(step: Step, one: ModelContender, device: torch.device, row: ModelRow) -> None:
    clear_gradients(step.subject)
    if device.type == "cuda":
        one.peak_bytes = peak_bytes(step, device)
    if not step.plan.profile:
        return
    trace = None
    if step.plan.trace is not None:
        trace = step.plan.trace / (
            re.sub(r"[^\w.-]+", "_", f"{row.name}-{row.mode}-{one.name}") + ".json.gz"
        )
    seen = profile(step, device, trace=trace)
    one.device_ms, one.shares = seen.ms, seen.shares()
    one.kernels = [dataclasses.asdict(kernel) for kernel in seen.kernels[:24]]
