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

import torch

from benchmarks.compiler.trials import show, stop
from benchmarks.launches.driver import Driver
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend.compat.triton import set_driver
from fusion_backend.decide import gate
from fusion_backend.ops import operator as op
from fusion_backend.options import Options


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


if __name__ == "__main__":
    main()
