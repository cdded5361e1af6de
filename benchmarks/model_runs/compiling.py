"""Compile time of whole models, with an empty cache and with a filled one."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

import fusion_backend
from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.measure.wall_time import milliseconds
from benchmarks.model_runs.failing import failing
from benchmarks.model_runs.steps import Compile, Plan, Step
from benchmarks.records.rows import FAILED, ModelContender
from fusion_backend.compat.torch import clear_caches
from fusion_backend.measure import store

WARM = 7  # compilations with a filled cache; their times vary a lot
# contenders that have compiled something in this process, and for training
STARTED: set[tuple[str, bool]] = set()


class Compilation(NamedTuple):
    """How long it took; for fusion also the classes of regions that the gate measured, and how long
    that took.
    """

    seconds: float
    classes: int
    measure_s: float


@contextlib.contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Inductor and Triton keep what they compile in `folder`, and remember nothing else."""
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    before = {name: os.environ.get(name) for name in names}
    clear_caches()
    store.store_in.cache_clear()
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
    """Compile every contender, each in caches of its own, and note the median time with an empty
    cache and with a filled one.
    """
    answers = store.store()  # the user's, before each contender has its own
    turns = ["cold"] * plan.cold + ["warm"] * (WARM if plan.warm else 0)
    took: dict[tuple[str, str], list[Compilation]] = {}
    for number, turn in enumerate(turns, 1):
        stays = number == len(turns)
        for name, step in steps.items():
            one = found[name]
            if one.status == FAILED:
                continue
            if name != "eager":
                say(f"{name}: compiling" + (" with a filled cache" if turn == "warm" else ""))
            # Compiled code is kept by function, so a reset takes that of all contenders: only while
            # none is to stay.
            if not stays:
                torch.compiler.reset()
            if name == "fusion":
                as_a_program_of_its_own()
            # else a long collection falls to whoever happens to compile when it is due
            gc.collect()
            cache = f"{folder}/{name}/{min(number, plan.cold)}"
            with failing(one), cache_in(cache):
                seconds = seconds_to_compile(step, device)
                if name == "fusion" and plan.keep_answers:
                    for answer in store.store().all():
                        answers.put(answer)
            if one.status == FAILED or name == "eager":
                continue
            graphs = fusion_backend.report().graphs if name == "fusion" else []
            measured = sum(g.measured for g in graphs), sum(g.measure_s for g in graphs)
            took.setdefault((name, turn), []).append(Compilation(seconds, *measured))
            note_times(one, turn, took[name, turn])
            if name == "fusion":
                note_sites(one)
        if not stays:
            torch.compiler.reset()


def note_times(one: ModelContender, turn: str, took: list[Compilation]) -> None:
    """What counts is the compilation with the median time, the shorter of two in the middle."""
    middle = sorted(took)[(len(took) - 1) // 2]
    if turn == "cold":
        one.cold_s, one.colds_s = middle.seconds, [each.seconds for each in took]
    else:
        one.warm_s = middle.seconds
    if one.name == "fusion":
        one.measured[turn] = [middle.classes, middle.measure_s]


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
    """Without places in the source: equal reasons count together."""
    return re.sub(r", at \S+:\d+,|,? at \S+:\d+", "", reason)
