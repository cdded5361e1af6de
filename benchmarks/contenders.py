"""The ways to compute a piece of work, and what each of them does with it."""

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

import fusion_backend
from benchmarks.accuracy import errors, wrong
from benchmarks.counting import draws
from benchmarks.measure import peak_bytes, said, synchronize, until_it_fails, whole_calls
from benchmarks.results import FAILED, OK, WRONG, Contender, Row, Spread
from benchmarks.timing import ROUNDS, Clock, copy_bandwidth, in_turn, matrix_rate, noise, verdict
from benchmarks.trace import profile
from benchmarks.work import NAMES, Work
from fusion_backend.compat.torch import inductor_config
from fusion_backend.ops.registry import RULES

inductor_config.max_autotune_report_choices_stats = False  # its tables would bury ours
TWIN, ALWAYS = "inductor-again", "fusion-always"
Maker = Callable[[Callable], Callable]  # reference -> the function that is timed


HOW = {  # what torch.compile is told
    "inductor": {},
    "max-autotune": dict(mode="max-autotune-no-cudagraphs"),
    "fusion": dict(backend="fusion"),
    ALWAYS: dict(backend="fusion", options={"fusion.gate": "always"}),
}


def compiled(how: dict) -> Maker:
    return lambda reference: torch.compile(lambda *args: reference(*args), dynamic=False, **how)


CONTENDERS: dict[str, Maker] = {
    "eager": lambda reference: reference,
    **{name: compiled(how) for name, how in HOW.items()},
}


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


def step(fn: Callable, args: list, dys: list[Tensor] | None) -> list[Tensor]:
    """The results, and with `dys` the gradients of the arguments."""
    outs = results_of(fn, args)
    if dys is None:
        return outs
    return [
        *outs,
        *torch.autograd.grad(
            outs, [a for a in args if isinstance(a, Tensor) and a.requires_grad], dys
        ),
    ]


def results_of(fn: Callable, args: list) -> list[Tensor]:
    out = fn(*args)
    return list(out) if isinstance(out, tuple) else [out]


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


def saved_bytes(fn: Callable, args: list) -> int:
    """Bytes of the tensors that the forward keeps for the backward, each storage once.

    Compiled functions keep theirs with ctx.save_for_backward, which the hooks see as well.
    """
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outs = fn(*args)  # held, so that no address comes twice
    del outs
    return sum(storages.values())


def measure(work: Work, bench: Bench, makers: dict[str, Maker] = CONTENDERS) -> Row:
    """Everything about one piece of work. A contender that raises, or is wrong, is marked; the
    others go on.
    """
    row = Row(
        work.name, work.pattern, work.case, NAMES[work.dtype], work.train, work.linear,
        bytes=work.bytes,
        flops=work.flops, intensity=work.flops / work.bytes,
        floor_ms=work.floor_ms(bench.copy_bytes_s, bench.matrix_flops_s), contenders=[],
    )  # fmt: skip
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
    dys = (
        [torch.randn_like(out) for out in results_of(next(iter(fns.values())), args)]
        if work.train and fns
        else None
    )
    for name, fn in fns.items():
        path = bench.trace / f"{work.name.replace(' ', '-')}-{name}.json.gz"
        found = profile(functools.partial(step, fn, args, dys), bench.clock.device, trace=path)
        print(f"{work.name}, {name}: {path}\n{found.table(rows=5)}")


def first_calls(
    work: Work, device: torch.device, makers: dict[str, Maker], row: Row
) -> dict[str, Callable]:
    """Compile, check and weigh every contender; returns those that can be timed."""
    reference, args = work.function, work.arguments(device)
    random = draws(reference, work.arguments(torch.device("meta")))
    shown = work.pattern != "attention"  # what was dropped, by the result: not of probabilities
    if random and shown:
        with torch.no_grad():
            args[1].zero_()  # the residual: the last result shows what was dropped,
            args[0].masked_fill_(args[0] == 0, 1.0)  # and nothing else is 0
    outs = results_of(reference, args)
    dys = [torch.randn_like(out) for out in outs] if work.train else None
    exact, fns = None, {}
    del outs
    try:
        if shown or not random:
            exact, plain = exactly(work, args, dys), step(reference, args, dys)
        else:
            row.note = "random: no errors"
    except torch.OutOfMemoryError:
        row.note = "out of memory for fp64: no errors"
    for name, make in makers.items():
        if name == ALWAYS and nothing_declined(row.of("fusion"), work.pattern):
            continue  # it would be the same code
        mine = Contender(name)
        row.contenders.append(mine)
        fusion_backend.reset()
        start = time.perf_counter()
        try:
            fn = make(reference)
            got = step(fn, args, dys)
            synchronize(device)
            mine.compile_s = time.perf_counter() - start
            what = ""
            if exact is not None:
                if random:
                    with same_mask(got[RULES[work.pattern].outputs - 1] != 0):
                        exact, plain = exactly(work, args, dys), step(reference, args, dys)
                mine.errors, what = errors(got, exact), wrong(got, plain, exact)
            mine.status, mine.note = (WRONG, what) if what else (mine.status, "")
            del got
            if work.train:
                mine.saved_bytes = saved_bytes(fn, args)
            if device.type == "cuda":
                mine.peak_bytes = peak_bytes(functools.partial(step, fn, args, dys), device)
        except Exception as error:
            mine.status, mine.note = FAILED, said(error)
            continue
        finally:
            if name.startswith("fusion"):
                mine.sites, mine.declined = sites(work.pattern)
        fns[name] = fn
    return fns


def same_mask(kept: Tensor):
    """A context in which dropout keeps these elements."""
    return unittest.mock.patch.object(F, "dropout", lambda x, p, training: x * kept / (1 - p))


def sites(pattern: str) -> tuple[list[dict], str]:
    """What fusion reports about this row, and why the pattern is left to Inductor, if it is."""
    found = fusion_backend.report().sites
    of_it = [s for s in found if s.pattern == pattern]
    why = of_it[0].reason if of_it else "not recognised"
    listed = [
        dict(
            pattern=s.pattern,
            fused=s.fused,
            reason=s.reason,
            forward=s.forward,
            backward=s.backward,
        )
        for s in found
    ]
    return listed, "" if any(s.fused for s in of_it) else why


def nothing_declined(mine: Contender | None, pattern: str) -> bool:
    """Has the default gate taken whatever fusion.gate=always can take?"""
    of_it = [site for site in mine.sites if site["pattern"] == pattern] if mine else []
    return bool(of_it) and all(
        site["fused"] and site["forward"] in ("kernel", "library") for site in of_it
    )


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
    dys = [torch.randn_like(out) for out in outs] if work.train else None
    del outs
    turns = {
        name: until_it_fails(row.of(name), lambda args, fn=fn: step(fn, args, dys))
        for name, fn in steps.items()
    }
    whole = whole_calls({name: functools.partial(turn, args) for name, turn in turns.items()},
        clock.device,
                        bench.rounds)  # fmt: skip
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
    if clock.exposed > exposed:
        row.note = f"{row.note}; the GPU waited for the host in {clock.exposed - exposed} samples".removeprefix(
            "; "
        )
    if (base := row.of("inductor")) and base.kernel:
        row.noise = noise(base.kernel, row.of(TWIN).kernel) if row.of(TWIN).kernel else None
        for mine in row.contenders:
            if mine.kernel and mine.name not in ("inductor", TWIN):
                mine.verdict = verdict(mine.kernel, base.kernel, row.noise)
