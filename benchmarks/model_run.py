"""Measure a whole model under several contenders: compile time, errors, step time in turns, memory,
kernels.

All contenders run the same weights on the same inputs in one process. One that fails is reported;
the others go on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import fusion_backend
from benchmarks.measure import (
    joint_distance,
    milliseconds,
    peak_bytes,
    said,
    until_it_fails,
    whole_calls,
)
from benchmarks.model_zoo import Subject
from benchmarks.results import FAILED, OK, WRONG, ModelContender, ModelRow, Spread
from benchmarks.timing import noise, verdict
from benchmarks.trace import profile
from fusion_backend.compat.torch import clear_caches, many_recompiles, pytree

AGAIN = "-again"
# fp32 sums of millions of terms, in another order, are that many eps apart; a loss is one of them
SUMS = 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
# contenders that have compiled something in this process, and for training
STARTED: set[tuple[str, bool]] = set()
Compile = Callable[[Callable], Callable]  # what a contender makes of a function


def contenders(gate: str = "auto", max_autotune: bool = False) -> dict[str, Compile]:
    def compiled(**how) -> Compile:
        return lambda step: torch.compile(step, dynamic=False, **how)

    found = {"eager": lambda step: step, "inductor": compiled()}
    if max_autotune:
        found["max-autotune"] = compiled(mode="max-autotune-no-cudagraphs")
    return found | {"fusion": compiled(backend="fusion", options={"fusion.gate": gate})}


@dataclasses.dataclass(frozen=True)
class Plan:
    """train: a step has a backward, and with an optimizer ("sgd", "adamw") its step. cold: compile
    with an empty cache, forget, and compile again with the filled one; otherwise once, with an
    empty one. exact: the dtype of the run that errors are against, None for none. rounds: turns of
    each contender, of at least least_ms each. profile: look at kernels; trace: the folder of their
    traces.
    """

    train: bool = False
    optimizer: str | None = None
    cold: bool = True
    exact: torch.dtype | None = torch.float64
    rounds: int = 11
    least_ms: float = 50
    profile: bool = True
    trace: Path | None = None


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


@contextlib.contextmanager
def failing(one: ModelContender) -> Iterator[None]:
    """What is raised inside becomes the contender's failure, and the memory it held is
    given back.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # of the model, the compiler or the device: the other contenders go on
        one.status, one.note, one.step = FAILED, said(error), None
    if one.status == FAILED:
        give_back()


def give_back() -> None:
    gc.collect()  # tracebacks hold on to tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Compiling.


@contextlib.contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Inductor and Triton keep what they compile in `folder`, and remember nothing else."""
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    before = {name: os.environ.get(name) for name in names}
    clear_caches()
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def seconds_to_compile(step: Step, device: torch.device) -> float:
    """The first step's time less the second's."""
    first = milliseconds(step, 1, device)
    return max(0.0, first - milliseconds(step, 1, device)) / 1e3


def start_compilers(
    makes: dict[str, Compile], train: bool, device: torch.device, folder: str
) -> None:
    """What a process pays once, for imports, workers and our patterns, is no model's
    compile time.
    """
    for name, make in makes.items():
        if (name, train) in STARTED:
            continue
        # one that cannot compile says so with the model
        with cache_in(folder), contextlib.suppress(Exception):
            x = torch.ones(4, 8, device=device, requires_grad=train)
            y = make(lambda x: torch.nn.functional.layer_norm(x, (8,)).sin() + 1)(x)
            if train:
                y.sum().backward()
        STARTED.add((name, train))
    torch.compiler.reset()


def compile_all(
    steps: dict[str, Step],
    found: dict[str, ModelContender],
    plan: Plan,
    device: torch.device,
    folder: str,
    say,
) -> None:
    """Compile every contender, each in a cache of its own, and note how long it took."""
    for turn in ("cold", "warm") if plan.cold else ("cold",):
        for name, step in steps.items():
            one = found[name]
            if one.status == FAILED:
                continue
            if name != "eager":
                say(f"{name}: compiling" + (" with a filled cache" if turn == "warm" else ""))
            # Compiled code is kept by function, so a reset takes that of all contenders: only while
            # none is to stay.
            if plan.cold and turn == "cold":
                torch.compiler.reset()
            if name == "fusion":
                fusion_backend.reset()
            with failing(one), cache_in(f"{folder}/{name}"):
                seconds = seconds_to_compile(step, device)
                if name != "eager":
                    setattr(one, f"{turn}_s", seconds)
            if name == "fusion" and one.status != FAILED:
                note_sites(one)
        if turn == "cold" and plan.cold:
            torch.compiler.reset()


def note_sites(one: ModelContender) -> None:
    report = fusion_backend.report()
    one.fused = dict(collections.Counter(site.pattern for site in report.fused))
    left = collections.Counter(
        (s.pattern, shortened(s.reason)) for s in report.sites if not s.fused and not s.covered
    )
    one.declined = [
        dict(pattern=pattern, reason=why, count=n) for (pattern, why), n in left.most_common()
    ]
    errors = [graph.error for graph in report.graphs if graph.error]
    one.declined += [dict(pattern="graph", reason=shortened(e), count=1) for e in errors]


def shortened(reason: str) -> str:
    """Without names of nodes and places in the source: equal reasons count together."""
    return re.sub(r"^\w+ inside it", "a value inside it", re.sub(r",? at \S+:\d+", "", reason))


# Errors.


def floats(output: object) -> dict[int, Tensor]:
    """The floating tensors of an output, which may be a dataclass, in order."""
    leaves = pytree.tree_leaves(output)
    while any(dataclasses.is_dataclass(x) for x in leaves):
        leaves = pytree.tree_leaves([vars(x) if dataclasses.is_dataclass(x) else x for x in leaves])
    found = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not found:
        raise ValueError(f"the output has no floating tensor to compare: {type(output).__name__}")
    return dict(enumerate(found))


def exact_results(subject: Subject, plan: Plan) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the same weights in plan.exact."""
    wide = subject.cast(plan.exact)
    step = Step(wide, lambda fn: fn, dataclasses.replace(plan, optimizer=None))
    outputs = {i: x.clone() for i, x in floats(step()).items()}
    return outputs, step.gradients() if plan.train else {}


def compare(
    step: Step, one: ModelContender, exact: tuple, eager: ModelContender, dtype: torch.dtype
) -> None:
    """Note the errors. Wrong is what is above twice eager's own and an eps of the dtype, from fp32
    on SUMS of them.
    """
    outputs, gradients = exact
    one.output_error = joint_distance(floats(step()), outputs)
    if step.plan.train:
        got = step.gradients()
        if got.keys() != gradients.keys():
            one.status, one.note = (
                WRONG,
                f"gradients of other parameters: {sorted(got.keys() ^ gradients.keys())[:3]}",
            )
            return
        one.gradient_error = joint_distance(got, gradients)
    for what in ("output_error", "gradient_error"):
        mine, base = getattr(one, what), getattr(eager, what) or 0.0
        limit = 2 * base + torch.finfo(dtype).eps * (SUMS if dtype.itemsize >= 4 else 1)
        if mine is not None and not mine <= limit:  # NaN, too
            one.status, one.note = (
                WRONG,
                f"{what.replace('_', ' ')} {mine:.1e}, eager's is {base:.1e}",
            )


# Times and kernels.


def clear_gradients(subject: Subject) -> None:
    for p in subject.model.parameters():
        p.grad = None


def measure(
    subject: Subject,
    makes: dict[str, Compile],
    plan: Plan,
    row: ModelRow,
    device: torch.device,
    say=print,
) -> ModelRow:
    """Fill the row. `say` is told what goes on."""
    found = {name: ModelContender(name) for name in makes}
    row.contenders = list(found.values())
    folder = tempfile.mkdtemp(prefix="benchmark-cache-")
    try:
        with many_recompiles():
            start_compilers(makes, plan.train, device, f"{folder}/start")
            steps = {name: Step(subject, make, plan) for name, make in makes.items()}
            compile_all(steps, found, plan, device, folder, say)
            compare_all(subject, steps, found, row, say)
            alive = {name: step for name, step in steps.items() if found[name].status != FAILED}
            time_all(alive, found, row, device, say)
            for name, step in alive.items():
                if found[name].status == FAILED:
                    continue
                say(f"{name}: memory and kernels")
                with failing(found[name]):
                    look_inside(step, found[name], device, row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        clear_gradients(subject)
        torch.compiler.reset()  # compiled code holds on to the model
        give_back()
    return row


def compare_all(subject: Subject, steps: dict[str, Step], found, row: ModelRow, say) -> None:
    plan = next(iter(steps.values())).plan
    if plan.exact is None:
        return
    say(f"the exact results, in {plan.exact}")
    exact = None
    try:
        exact = exact_results(subject, plan)
        row.exact = str(plan.exact).removeprefix("torch.")
    except Exception as error:  # too large for the memory, or an operator without this dtype
        row.notes.append(f"no errors: the run in {plan.exact} failed, {said(error)}")
    if exact is None:
        give_back()
        return
    eager = found.get("eager", ModelContender("eager"))
    for name, step in steps.items():
        if found[name].status == OK:
            with failing(found[name]):
                compare(step, found[name], exact, eager, DTYPES[row.dtype])
    if eager.status == OK and "eager" in steps:
        first, second = floats(steps["eager"]()), floats(steps["eager"]())
        if not all(torch.equal(first[i], second[i]) for i in first):
            row.notes.append("two eager runs differ (dropout? atomics?): errors contain that")


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
    one.kernels = [dataclasses.asdict(kernel) for kernel in seen.kernels[:10]]
