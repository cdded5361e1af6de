"""What compiling kernels on trial costs, without a GPU: seconds for a model's graph, and for every
kernel, for sm_90.

    python -m benchmarks.trial_cost [MODEL ...] [--mode train] [--threads 1 2] [--tiny]

The gate decides the model's sites, on CPU tensors that pass for CUDA's, and Triton compiles their
kernels for an H100 or H200, each distinct launch once, in so many threads; nothing runs and
Triton's cache is not read. A kernel's seconds are those with the first number of threads. With
--tiny: small models, and whatever the kernels can take.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter, defaultdict
from unittest import mock

import torch
import triton

from benchmarks.model_zoo import ENTRIES, build
from fusion_backend.compat.torch import inductor_config
from fusion_backend.compat.triton import SM_90, forget_compiled, set_driver
from fusion_backend.decide import gate
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.ops import operator as op
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.report import GraphRecord


class Driver:
    """Stands for a GPU that is asked what it is, and never to do anything."""

    def get_current_target(self):
        return SM_90

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def pretended_gpu():
    """PyTorch is told that there is a GPU of sm_90. A build with CUDA would look for its driver."""
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    ):
        yield


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
        fuse_graph(gm, options, record, usable(patterns()))
        seconds = time.perf_counter() - started
    compiled.forget()
    return seconds, sum(site.fused for site in record.sites), compiled


def show(name: str, gm: torch.fx.GraphModule, options: Options, threads: list[int]) -> None:
    usable(patterns())
    fuse_graph(
        gm, options, GraphRecord(0), usable(patterns())
    )  # what is done once a process is not counted
    runs = [(n, *cost(gm, options, n)) for n in threads]
    _, _, sites, compiled = runs[0]
    each = Counter({kernel: sum(seconds) for kernel, seconds in compiled.seconds.items()})
    print(f"{name}: {sites} sites, {sum(map(len, compiled.seconds.values()))} distinct launches")
    for kernel, seconds in each.most_common():
        print(f"  {kernel:<34}{len(compiled.seconds[kernel]):>4}{seconds:>9.2f} s")
    for n, seconds, _, _ in runs:
        print(f"  {f'the whole pass, threads: {n}':<38}{seconds:>9.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trial_cost", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("models", nargs="*", default=["t5", "bert", "vit"], metavar="MODEL")
    parser.add_argument("--mode", choices=("infer", "train"), default="train")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.models) - set(ENTRIES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    set_driver(Driver())
    gate.on_gpu = op.on_gpu = lambda tensor: True
    options = Options(gate="always") if asked.tiny else Options()
    for name in asked.models:
        size = ENTRIES[name].tiny if asked.tiny else ENTRIES[name].full
        subject = build(name, asked.mode, size, "sdpa", torch.device("cpu"), torch.bfloat16)
        graphs: list[torch.fx.GraphModule] = []

        def keep(gm, inputs, graphs=graphs):
            graphs.append(gm)
            return stop  # a backend that raises has its graph emptied by torch 2.15

        torch.compiler.reset()
        try:
            with torch.set_grad_enabled(asked.mode == "train"):
                torch.compile(subject.model, backend=keep)(*subject.args, **subject.kwargs)
        except Exception:
            if not graphs:
                raise
        show(f"{name} {asked.mode}", graphs[0], options, asked.threads)


class Stop(Exception):
    """The graph is here: the model need not run."""


def stop(*inputs):
    raise Stop


if __name__ == "__main__":
    main()
