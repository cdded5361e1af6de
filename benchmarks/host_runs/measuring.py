"""A small graph under the contenders: the host's time a call, in turn, and its layers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import statistics
import time
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.host_runs.generated import LIBRARY, Counts, counted, is_ours
from benchmarks.host_runs.layers import Layers
from benchmarks.measure.trace import our_kernels
from benchmarks.measure.wall_time import synchronize
from benchmarks.subjects.small_graphs import SmallGraph
from fusion_backend.compat.generated import (
    forget_generated,
    generated_modules,
    graph_calls_through,
)
from fusion_backend.compat.torch import inductor
from fusion_backend.frontends.dynamo import fusion

CONTENDERS = ("inductor", "fusion", "inductor-again")
ALWAYS = {"fusion.gate": "always"}
CALLS = 10  # a turn: fewer launches than the queue of a GPU takes before the host must wait
FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass
class Step:
    """A call of a compiled graph, and of its backward where `grads` are given."""

    compiled: Callable
    inputs: list[torch.Tensor]
    grads: list[torch.Tensor] | None
    phase: str = FORWARD
    backward: Callable = torch.autograd.grad

    def __call__(self) -> None:
        self.phase = FORWARD
        out = self.compiled(*self.inputs)
        if self.grads is None:
            return
        self.phase = BACKWARD
        out = list(out) if isinstance(out, tuple) else [out]
        self.backward(out, [x for x in self.inputs if x.requires_grad], self.grads)


@dataclasses.dataclass
class Measured:
    """A contender of a row: µs a call in each turn, what its code does, its layers in µs."""

    us: list[float]
    counts: Counts
    layers: dict[str, float]
    code: list[str]


def own_code(fn: Callable, who: str) -> Callable:
    """The function with a code object of its own: Dynamo looks through all that it has compiled
    for one, whoever asked.
    """
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{who.replace('-', '_')}")
    return types.FunctionType(code, fn.__globals__, code.co_name)


def compiled_by(who: str, fn: Callable) -> Callable:
    own = own_code(fn, who)
    if who == "fusion":
        return torch.compile(own, backend="fusion", options=ALWAYS)
    return torch.compile(own)


def layered(who: str, fn: Callable, layers: Layers) -> Callable:
    """As `compiled_by`, with timers around the guards and around what they lead to."""

    def backend(gm, example_inputs):
        if who == "fusion":
            made = fusion(gm, example_inputs, options=ALWAYS)
        else:
            made = inductor(None, None)(gm, example_inputs)
        return layers.timed("AOT forward", made)

    return layers.timed("guards", torch.compile(own_code(fn, f"{who}_layers"), backend=backend))


def measured(
    graph: SmallGraph, train: bool, device: torch.device, rounds: int, layers: Layers
) -> dict[str, Measured]:
    """All contenders of a row. Raises what compiling raises."""
    inputs = graph.inputs(device, train)
    with torch.no_grad() if not train else contextlib.nullcontext():
        grads = gradients(graph, inputs) if train else None
        steps = {who: Step(compiled_by(who, graph.fn), inputs, grads) for who in CONTENDERS}
        for step in steps.values():
            step(), step(), step()
        us = in_turn(steps, device, rounds)
        found = {}
        for who in CONTENDERS[:2]:
            forget_generated()
            step = Step(layered(who, graph.fn, layers), inputs, grads)
            step()
            modules = generated_modules()
            code = [inspect.getsource(module) for module in modules]
            counts = sum((counted(text, our_kernels()) for text in code), Counts())
            found[who] = Measured(
                us[who], counts, split(step, modules, device, rounds, layers), code
            )
        found[CONTENDERS[2]] = Measured(us[CONTENDERS[2]], found["inductor"].counts, {}, [])
    return found


def gradients(graph: SmallGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of ones; nothing is computed to know their shapes."""
    out = graph.fn(*(x.to("meta") for x in inputs))
    results = out if isinstance(out, tuple) else (out,)
    return [torch.ones_like(y, device=inputs[0].device) for y in results]


def in_turn(
    steps: dict[str, Callable[[], None]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """µs a call of the host alone: the GPU has nothing to do when a turn begins, and the turn does
    not wait for it.
    """
    us: dict[str, list[float]] = {who: [] for who in steps}
    names = list(steps)
    with without_collections():
        for turn in range(rounds):
            shift = turn % len(names)
            for who in names[shift:] + names[:shift]:
                us[who].append(host_us(steps[who], device))
    return us


def host_us(step: Callable[[], None], device: torch.device) -> float:
    step()
    synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        step()
    took = time.perf_counter_ns() - start
    synchronize(device)
    return took / 1e3 / CALLS


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def split(
    step: Step, modules: list[types.ModuleType], device: torch.device, rounds: int, layers: Layers
) -> dict[str, float]:
    """µs a call by layer: the median of the rounds."""
    step.backward = layers.timed("autograd, AOT backward", step.backward)

    def wrapper(call):
        return layers.timed(lambda: f"wrapper {step.phase}", call)

    taken: dict[str, list[float]] = {}
    with contextlib.ExitStack() as timers:
        timers.enter_context(graph_calls_through(wrapper))
        for module in modules:
            instrument(module, step, layers, timers)
        step()
        with without_collections():
            for _ in range(rounds):
                layers.reset()
                host_us(step, device)
                for name, us in layers.microseconds(CALLS + 1).items():
                    taken.setdefault(name, []).append(us)
    return {name: statistics.median(us) for name, us in taken.items()}


def instrument(
    module: types.ModuleType, step: Step, layers: Layers, timers: contextlib.ExitStack
) -> None:
    """Timers around the launches, allocations and library calls of generated code."""

    def put(name, value):
        timers.enter_context(mock.patch.object(module, name, value))

    ours = our_kernels()
    for name, value in list(vars(module).items()):
        if name.startswith("empty_strided"):
            put(name, layers.timed(lambda: f"allocations {step.phase}", value))
        elif hasattr(value, "run") and hasattr(value, "launchers"):
            whose = "our" if is_ours(name, ours) else "Inductor's"
            run = layers.timed(lambda whose=whose: f"{whose} launches {step.phase}", value.run)
            put(name, types.SimpleNamespace(run=run))
    library = {found[0] for found in LIBRARY.findall(inspect.getsource(module)) if found[0]}
    if library:
        timed = {
            name: layers.timed(
                lambda: f"library {step.phase}", getattr(module.extern_kernels, name)
            )
            for name in library
        }
        put("extern_kernels", types.SimpleNamespace(**timed))
