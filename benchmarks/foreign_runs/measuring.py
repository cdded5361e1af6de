"""One graph under plain Inductor and fusion, in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import fusion_backend
from benchmarks.foreign_code.problems import DTYPES, INFER, Graph
from benchmarks.foreign_runs.checking import Distance, distance, worse
from benchmarks.foreign_runs.rows import NO_BASELINE, GraphRow, Side
from benchmarks.foreign_runs.steps import (
    AUTOTUNED,
    FUSION,
    INDUCTOR,
    TWINS,
    Step,
    contenders,
    entry,
)
from benchmarks.measure.failures import said
from benchmarks.measure.memory import peak_bytes
from benchmarks.measure.timing import Clock, in_turn, noise, verdict
from benchmarks.measure.wall_time import synchronize, whole_calls
from benchmarks.model_runs.compiling import cache_in, shortened
from benchmarks.model_runs.failing import give_back
from benchmarks.processes.turns import Turns
from benchmarks.records.rows import FAILED, OK, WRONG, Spread
from fusion_backend.measure.layouts import NAME as LAYOUT


class How(NamedTuple):
    """size: full or tiny. options: those of fusion. rounds: turns of each contender. apart: each
    contender has caches of its own; otherwise fusion finds what Inductor has compiled. warm: the
    caches are the user's, and nothing is added beside them. max_autotune: one contender more.
    """

    size: str
    options: dict
    rounds: int
    apart: bool
    warm: bool = False
    max_autotune: bool = False


def measure(graph: Graph, how: How, row: GraphRow, turns: Turns, device: torch.device) -> None:
    """Fill the row. A contender that raises is marked in it."""
    with torch.set_grad_enabled(graph.mode != INFER):
        turns.at("building")
        with turns.shared():
            step = Step(graph, how.size, device)
        turns.at("starting the compilers")
        start(contenders(how.options), step.train, device, os.getpid() if how.apart else 1)
        functions = compiled(step, how, row, turns, device)
        if row.status == OK:
            turns.at("checking")
            with turns.shared():
                check(step, functions, row, DTYPES[graph.dtype])
            give_back()
            turns.at("timing")
            with turns.alone():
                times(step, functions, row, how.rounds, device)


def start(makes: dict[str, Callable], train: bool, device: torch.device, number: int = 1) -> None:
    """What a process pays once, for imports and our patterns, is no graph's compile time. A number
    that no other process has given is compiled, not taken from a cache.
    """
    for make in makes.values():
        # one that cannot compile says so with the graph
        with contextlib.suppress(Exception):
            x = torch.ones(4, 8, device=device, requires_grad=train)
            y = make(lambda x: torch.nn.functional.layer_norm(x, (8,)).sin() + number)(x)
            if train:
                y.sum().backward()


def compiled(
    step: Step, how: How, row: GraphRow, turns: Turns, device: torch.device
) -> dict[str, Callable]:
    """The functions of the contenders and of their twins, each compiled and called twice. A twin
    stands for the luck of a compilation: Inductor times the configurations of its kernels, and does
    not always choose the same ones.
    """
    functions, makes = {}, contenders(how.options, how.max_autotune)
    twins = {twin: makes[name] for name, twin in TWINS.items()}
    for name, make in {**makes, **twins}.items():
        side = Side(name)
        row.sides.append(side)
        turns.at(f"compiling under {name}")
        fusion_backend.reset()
        try:
            functions[name] = make(entry(step.module, name))
            own = how.apart or (name in TWINS.values() and not how.warm)
            with caches_of(name) if own else contextlib.nullcontext():
                first_calls(step, functions[name], side, turns, device)
        except Exception as error:
            side.status, side.note = FAILED, said(error)
            if name == AUTOTUNED:
                functions.pop(name, None)
                continue
            row.status = FAILED if name in (FUSION, TWINS[FUSION]) else NO_BASELINE
            row.note = f"{name}: {side.note}"
            return functions
        if name == FUSION:
            note_sites(row)
    return functions


@contextlib.contextmanager
def caches_of(name: str) -> Iterator[None]:
    """A copy of the process's caches, without the configurations that Inductor has chosen, which
    this contender alone fills.
    """
    own = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    shutil.copytree(own, f"{own}-{name}", ignore=shutil.ignore_patterns("*.best_config"))
    with cache_in(f"{own}-{name}"):
        yield


def first_calls(
    step: Step, function: Callable, side: Side, turns: Turns, device: torch.device
) -> None:
    begun, waited = time.perf_counter(), turns.waited
    step(function, step.inputs)
    synchronize(device)
    side.waited_s = turns.waited - waited
    first = time.perf_counter() - begun - side.waited_s
    with turns.shared():
        begun = time.perf_counter()
        step(function, step.inputs)
        synchronize(device)
        side.compile_s = max(0.0, first - (time.perf_counter() - begun))
        if device.type == "cuda":
            side.peak_bytes = peak_bytes(lambda: step(function, step.inputs), device)


def note_sites(row: GraphRow) -> None:
    """What fusion reports of sites, and of the layout of images where it was in question. A graph
    that it gave to Inductor because of an error is a failure.
    """
    report = fusion_backend.report()
    asked = [graph for graph in report.graphs if graph.layout]
    laid_out = [(LAYOUT, graph.layout) for graph in asked if graph.lays_out]
    left = [(LAYOUT, graph.layout) for graph in asked if not graph.lays_out]
    row.accepted = counted(laid_out + [(s.pattern, s.reason) for s in report.fused])
    row.declined = counted(
        left + [(s.pattern, s.reason) for s in report.sites if not s.fused and not s.covered]
    )
    if errors := [graph.error for graph in report.graphs if graph.error]:
        row.status, row.note = FAILED, f"fusion gave the graph to Inductor: {errors[0]}"


def counted(sites) -> list[dict]:
    found = collections.Counter((pattern, shortened(why)) for pattern, why in sites)
    return [dict(pattern=pattern, reason=why, count=n) for (pattern, why), n in found.items()]


def check(step: Step, functions: dict[str, Callable], row: GraphRow, dtype: torch.dtype) -> None:
    """Note the errors; ours is wrong where it is worse than Inductor's, and than eager's."""
    if step.random:
        row.note = "it draws random numbers: no errors"
        return
    exact = exactly(step, row, dtype)
    if exact is None:
        return

    def distances(function: Callable) -> list[Distance]:
        got = step(function, step.inputs)
        return [distance(*three) for three in zip(got, exact, step.dtypes, strict=True)]

    found: dict[str, list[Distance]] = {}
    for name, function in functions.items():
        found[name] = distances(function)
        side, n = row.side(name), step.outputs
        side.output_error = max(d.relative for d in found[name][:n])
        if step.train:
            side.gradient_error = max((d.relative for d in found[name][n:]), default=None)
    if why := worse(found[FUSION], found[INDUCTOR], dtype, step.outputs):
        # Inductor rounds fewer intermediate values than the model says: less than eager is right
        if not worse(found[FUSION], distances(step.module), dtype, step.outputs):
            row.note = f"no further off than eager, but than Inductor: {why}"
            return
        row.status, row.note, row.side(FUSION).status = WRONG, why, WRONG


def exactly(step: Step, row: GraphRow, dtype: torch.dtype) -> list | None:
    """Eager results in fp64, or in fp32 for what is too large or has no fp64."""
    for wide in (torch.float64, torch.float32):
        if wide.itemsize <= dtype.itemsize:
            break
        try:
            exact = step.exact(wide)
            row.exact = str(wide).removeprefix("torch.")
            return exact
        except Exception as error:
            row.note = f"no results in {wide}: {said(error)}"
        give_back()
    return None


def times(
    step: Step, functions: dict[str, Callable], row: GraphRow, rounds: int, device: torch.device
) -> None:
    """Device time and wall time of each contender and its twin, in turn. Of either, the better of
    the two counts.
    """
    turns = {name: lambda args, f=f: step(f, args) for name, f in functions.items()}
    whole = whole_calls(
        {name: lambda turn=turn: turn(step.inputs) for name, turn in turns.items()}, device, rounds
    )
    clock = Clock(device)
    kernel = in_turn(turns, step.fresh, clock, rounds)
    for side in (side for side in row.sides if side.name in functions):
        side.kernel, side.call = Spread.of(kernel[side.name]), Spread.of(whole[side.name])
    base, mine = row.best(INDUCTOR), row.best(FUSION)
    row.ratio = base.median / mine.median
    calls = (row.best(name, "call").median for name in (INDUCTOR, FUSION))
    row.call_ratio = operator.truediv(*calls)
    row.noise = noise(row.side(INDUCTOR).kernel, row.side(TWINS[INDUCTOR]).kernel)
    row.verdict = verdict(mine, base, row.noise)
    if AUTOTUNED in functions:
        ratio = row.side(AUTOTUNED).kernel.median / mine.median
        told = f"{ratio:.3f} times as fast as max-autotune"
        row.note = f"{row.note}; {told}" if row.note else told
    if clock.exposed:
        note = f"the GPU waited for the host in {clock.exposed} samples"
        row.note = f"{row.note}; {note}" if row.note else note
