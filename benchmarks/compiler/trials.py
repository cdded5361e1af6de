"""What compiling kernels on trial costs a model's first compilation."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import torch
import triton

from benchmarks.launches.driver import pretended_gpu
from fusion_backend.compat.torch import inductor_config
from fusion_backend.compat.triton import forget_compiled
from fusion_backend.frontends.dynamo import fuse_graph, patterns, usable
from fusion_backend.options import Options
from fusion_backend.reporting.report import GraphRecord


class Compiled:
    """Listens to Triton: the seconds of every compilation by kernel."""

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


def cost(gm: torch.fx.GraphModule, options: Options, threads: int) -> tuple[float, int, Compiled]:
    """Seconds of the whole pass, sites that are fused, and what was compiled meanwhile."""
    compiled, record = Compiled(), GraphRecord(0)
    with (
        inductor_config.patch(compile_threads=threads),
        triton.knobs.compilation.scope(),
        pretended_gpu(),
    ):
        triton.knobs.compilation.always_compile = True
        triton.knobs.compilation.listener = compiled
        started = time.perf_counter()
        fuse_graph(gm, options, record)
        seconds = time.perf_counter() - started
    compiled.forget()
    return seconds, sum(site.fused for site in record.sites), compiled


def show(name: str, gm: torch.fx.GraphModule, options: Options, threads: list[int]) -> None:
    usable(patterns())
    fuse_graph(gm, options, GraphRecord(0))  # what is done once a process is not counted
    runs = [(n, *cost(gm, options, n)) for n in threads]
    _, _, sites, compiled = runs[0]
    each = Counter({kernel: sum(seconds) for kernel, seconds in compiled.seconds.items()})
    print(f"{name}: {sites} sites, {sum(map(len, compiled.seconds.values()))} distinct launches")
    for kernel, seconds in each.most_common():
        print(f"  {kernel:<34}{len(compiled.seconds[kernel]):>4}{seconds:>9.2f} s")
    for n, seconds, _, _ in runs:
        print(f"  {f'the whole pass, threads: {n}':<38}{seconds:>9.2f} s", flush=True)


class Stop(Exception):
    """The graph is here: the model need not run."""


def stop(*inputs):
    raise Stop
