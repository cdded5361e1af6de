"""What compiling kernels on trial costs a model's first compilation."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
import triton

from benchmarks.launches.driver import pretended_gpu
from benchmarks.subjects.subject import Subject
from fusion_backend.compat.torch import inductor_config
from fusion_backend.compat.triton import forget_compiled
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord


class Compiled:
    """A listener of Triton's compilations: the seconds of each, by kernel."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.kernels = set()

    def __call__(self, src, times, **_):
        self.seconds[src.name].append(
            (times.ir_initialization + sum(s for _, s in times.lowering_stages)) / 1e6
        )
        self.kernels.add(src.fn)

    def forget(self):
        for kernel in self.kernels:
            forget_compiled(kernel)


class Cost(NamedTuple):
    threads: int
    seconds: float  # of the whole pass
    sites: int  # that are fused
    compiled: Compiled


def cost(gm: torch.fx.GraphModule, options: Options, threads: int) -> Cost:
    """Run the pass on a graph, with Triton's cache unread."""
    compiled, record = Compiled(), GraphRecord(0)
    with (
        inductor_config.patch(compile_threads=threads),
        triton.knobs.compilation.scope(),
        pretended_gpu(),
    ):
        triton.knobs.compilation.always_compile = True
        triton.knobs.compilation.listener = compiled
        started = time.perf_counter()
        fuse_graph(gm, options, record, usable(patterns()))
        seconds = time.perf_counter() - started
    compiled.forget()
    return Cost(threads, seconds, sum(site.fused for site in record.sites), compiled)


def show(name: str, gm: torch.fx.GraphModule, options: Options, threads: list[int]) -> None:
    """Print the seconds of each kernel with the first number of threads, and of the whole pass with
    each.
    """
    usable(patterns())
    fuse_graph(
        gm, options, GraphRecord(0), usable(patterns())
    )  # what is done once a process is not counted
    runs = [cost(gm, options, n) for n in threads]
    compiled = runs[0].compiled
    each = Counter({kernel: sum(seconds) for kernel, seconds in compiled.seconds.items()})
    launches = sum(map(len, compiled.seconds.values()))
    print(f"{name}: {runs[0].sites} sites, {launches} distinct launches")
    for kernel, seconds in each.most_common():
        print(f"  {kernel:<34}{len(compiled.seconds[kernel]):>4}{seconds:>9.2f} s")
    for run in runs:
        print(f"  {f'the whole pass, threads: {run.threads}':<38}{run.seconds:>9.2f} s", flush=True)


def first_graph(subject: Subject, train: bool) -> torch.fx.GraphModule:
    """The first graph that Dynamo captures of a model; the model does not run."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm, inputs):
        graphs.append(gm)
        return stop  # a backend that raises has its graph emptied by torch 2.15

    torch.compiler.reset()
    try:
        with torch.set_grad_enabled(train):
            torch.compile(subject.model, backend=keep)(*subject.args, **subject.kwargs)
    except Exception:
        if not graphs:
            raise
    return graphs[0]


class Stop(Exception):
    """The graph has been captured: the model need not run."""


def stop(*inputs):
    raise Stop
