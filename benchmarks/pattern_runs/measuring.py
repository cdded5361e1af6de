"""A piece of work under all contenders: errors, memory and times of each."""

from __future__ import annotations

import functools
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.accuracy import errors, wrong
from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.measure.counting import draws
from benchmarks.measure.failures import said, until_it_fails
from benchmarks.measure.memory import peak_bytes, saved_bytes
from benchmarks.measure.timing import (
    ROUNDS,
    Clock,
    copy_bandwidth,
    in_turn,
    matrix_rate,
    noise,
    verdict,
)
from benchmarks.measure.trace import profile
from benchmarks.measure.wall_time import synchronize, whole_calls
from benchmarks.pattern_runs.contenders import (
    ALWAYS,
    CONTENDERS,
    TWIN,
    Maker,
    gradients_for,
    nothing_declined,
    results_of,
    sites,
    step,
)
from benchmarks.records.rows import FAILED, OK, WRONG, Contender, Row, Spread
from benchmarks.workloads.work import NAMES, Work
from fusion_backend.ops.registry import FUSION_RULES


class Bench(NamedTuple):
    """Where measurements are made: the clock, and the ceilings it found."""

    clock: Clock
    copy_bytes_s: float
    matrix_flops_s: float
    rounds: int
    trace: Path | None = None  # the folder of Chrome traces

    @classmethod
    def of(cls, device: torch.device, rounds: int | None = None) -> Bench:
        default = ROUNDS if device.type == "cuda" else 3
        return cls(Clock(device), copy_bandwidth(device), matrix_rate(device), rounds or default)


def widened(args: list, dtype: torch.dtype) -> list:
    floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    return [
        a.detach().to(dtype).requires_grad_(a.requires_grad) if yes else a
        for a, yes in zip(args, floats, strict=True)
    ]


def exactly(work: Work, args: list, dys: list[Tensor] | None) -> list[Tensor]:
    """The step in fp64. Of a pattern that gives integers, in fp32: what has to be met is eager's
    integers.
    """
    reference = work.function
    exact = step(
        reference,
        widened(args, torch.float64),
        None if dys is None else [dy.double() for dy in dys],
    )
    return (
        exact
        if exact[0].is_floating_point()
        else results_of(reference, widened(args, torch.float32))
    )


def measure(work: Work, bench: Bench, makers: dict[str, Maker] = CONTENDERS) -> Row:
    """Everything about one piece of work. A contender that raises, or is wrong, is marked; the
    others go on.
    """
    row = Row(
        work.name,
        work.pattern,
        work.case,
        NAMES[work.dtype],
        work.train,
        work.linear,
        bytes=work.bytes,
        flops=work.flops,
        intensity=work.flops / work.bytes,
        floor_ms=work.floor_ms(bench.copy_bytes_s, bench.matrix_flops_s),
        contenders=[],
    )
    torch.compiler.reset()
    with torch.set_grad_enabled(work.train):
        fns = first_calls(work, bench.clock.device, makers, row)
        try:
            times(work, bench, fns, row)
        except Exception as error:
            for mine in row.contenders:
                if mine.status == OK and mine.kernel is None:
                    mine.status, mine.note = FAILED, f"not timed: {said(error)}"
        if bench.trace:
            traces(work, bench, fns)
    return row


def traces(work: Work, bench: Bench, fns: dict[str, Callable]) -> None:
    """A Chrome trace of each contender, and its longest kernels on stdout."""
    args = work.arguments(bench.clock.device)
    dys = gradients_for(results_of(next(iter(fns.values())), args)) if work.train and fns else None
    for name, fn in fns.items():
        path = bench.trace / f"{work.name.replace(' ', '-')}-{name}.json.gz"
        found = profile(functools.partial(step, fn, args, dys), bench.clock.device, trace=path)
        print(f"{work.name}, {name}: {path}\n{found.table(rows=5)}")


def first_calls(
    work: Work, device: torch.device, makers: dict[str, Maker], row: Row
) -> dict[str, Callable]:
    """Compile, check and weigh every contender; returns those that can be timed."""
    checked = Checked(work, device, row)
    fns = {}
    for name, make in makers.items():
        if name == ALWAYS and nothing_declined(row.of("fusion"), work.pattern):
            continue  # it would be the same code
        mine = Contender(name)
        row.contenders.append(mine)
        as_a_program_of_its_own()
        try:
            fns[name] = checked.first_call(make, mine)
        except Exception as error:
            mine.status, mine.note = FAILED, said(error)
        finally:
            if name.startswith("fusion"):
                mine.sites, mine.declined = sites(work.pattern)
    return fns


class Checked:
    """A step on given arguments, with the results that those of the contenders are compared with.

    Where the work draws random numbers, the elements that dropout keeps are read from a contender's
    last result, and the exact results are computed for these. Only a sum of dropout and a residual
    shows them: patterns without one have no errors.
    """

    def __init__(self, work: Work, device: torch.device, row: Row):
        self.work, self.device, self.reference = work, device, work.function
        self.args = work.arguments(device)
        self.random = draws(self.reference, work.arguments(torch.device("meta")))
        names = [p.name for p in FUSION_RULES[work.pattern].params]
        self.hidden = self.random and "residual" not in names
        if self.random and not self.hidden:
            with torch.no_grad():
                self.args[1].zero_()  # the residual: the last result shows what was dropped,
                self.args[0].masked_fill_(self.args[0] == 0, 1.0)  # and nothing else is 0
        outs = results_of(self.reference, self.args)
        self.dys = gradients_for(outs) if work.train else None
        self.exact = self.plain = None
        del outs
        try:
            if self.hidden:
                row.note = "random: no errors"
            else:
                self.compute_exactly()
        except torch.OutOfMemoryError:
            row.note = "out of memory for fp64: no errors"

    def compute_exactly(self) -> None:
        exact = exactly(self.work, self.args, self.dys)
        self.exact, self.plain = exact, step(self.reference, self.args, self.dys)

    def check(self, got: list[Tensor], mine: Contender) -> None:
        """Note the errors of a contender's results."""
        if self.exact is None:
            return
        if self.random:
            with same_mask(got[FUSION_RULES[self.work.pattern].outputs - 1] != 0):
                self.compute_exactly()
        mine.errors, what = errors(got, self.exact), wrong(got, self.plain, self.exact)
        if what:
            mine.status, mine.note = WRONG, what

    def first_call(self, make: Maker, mine: Contender) -> Callable:
        """The compiled function; its compile time, errors and memory are noted."""
        start = time.perf_counter()
        fn = make(self.reference)
        got = step(fn, self.args, self.dys)
        synchronize(self.device)
        mine.compile_s = time.perf_counter() - start
        self.check(got, mine)
        del got
        if self.work.train:
            mine.saved_bytes = saved_bytes(fn, self.args)
        if self.device.type == "cuda":
            call = functools.partial(step, fn, self.args, self.dys)
            mine.peak_bytes = peak_bytes(call, self.device)
        return fn


def same_mask(kept: Tensor):
    """A context in which dropout keeps these elements."""
    return unittest.mock.patch.object(F, "dropout", lambda x, p, training: x * kept / (1 - p))


def times(work: Work, bench: Bench, fns: dict[str, Callable], row: Row) -> None:
    """Kernel and whole-call times of what works, and what follows from them."""
    clock, steps = bench.clock, dict(fns)
    if "inductor" in fns:
        steps[TWIN] = fns["inductor"]
        row.contenders.append(Contender(TWIN))
    if not steps:
        return
    args = work.arguments(clock.device)
    outs = results_of(next(iter(fns.values())), args)
    dys = gradients_for(outs) if work.train else None
    del outs
    turns = {
        name: until_it_fails(row.of(name), lambda args, fn=fn: step(fn, args, dys))
        for name, fn in steps.items()
    }
    whole = whole_calls(
        {name: functools.partial(turn, args) for name, turn in turns.items()},
        clock.device,
        bench.rounds,
    )
    del args
    exposed = clock.exposed
    kernel = in_turn(turns, lambda: work.arguments(clock.device), clock, bench.rounds)
    for mine in (row.of(name) for name in steps):
        if mine.status == FAILED:
            continue
        name = mine.name
        mine.kernel, mine.call = Spread.of(kernel[name]), Spread.of(whole[name])
        mine.rate_bytes, mine.rate_flops = (
            n / mine.kernel.median * 1e3 for n in (row.bytes, row.flops)
        )
        mine.of_copy = mine.rate_bytes / bench.copy_bytes_s
        mine.of_matrix = mine.rate_flops / bench.matrix_flops_s
    if waited := clock.exposed - exposed:
        note = f"the GPU waited for the host in {waited} samples"
        row.note = f"{row.note}; {note}" if row.note else note
    if (base := row.of("inductor")) and base.kernel:
        row.noise = noise(base.kernel, row.of(TWIN).kernel) if row.of(TWIN).kernel else None
        for mine in row.contenders:
            if mine.kernel and mine.name not in ("inductor", TWIN):
                mine.verdict = verdict(mine.kernel, base.kernel, row.noise)
