"""What compiling kernels on trial costs, without a GPU: seconds for a model's graph and for each
kernel, for sm_90.

    python -m benchmarks.trial_cost [MODEL ...] [--mode train] [--threads 1 2] [--tiny]

The gate decides the model's sites on CPU tensors that pass for CUDA's, and Triton compiles their
kernels for an H100 or H200: each distinct launch once, with each number of --threads. Nothing runs,
and Triton's cache is not read. The seconds of a kernel are those with the first number of threads.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.compiler.trials import first_graph, show
from benchmarks.launches.driver import Driver
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend.compat.triton import set_driver
from fusion_backend.decide import gate
from fusion_backend.ops import operator as op
from fusion_backend.options import Options


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trial_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=["t5", "bert", "vit"],
        metavar="MODEL",
        help="default: t5 bert vit",
    )
    parser.add_argument("--mode", choices=("infer", "train"), default="train")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--tiny", action="store_true", help="small models, and every site that a kernel can take"
    )
    asked = parser.parse_args()
    if unknown := set(asked.models) - set(ENTRIES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    set_driver(Driver())
    gate.on_gpu = op.on_gpu = lambda tensor: True
    options = Options(gate="always") if asked.tiny else Options()
    for name in asked.models:
        size = ENTRIES[name].tiny if asked.tiny else ENTRIES[name].full
        subject = build(name, asked.mode, size, "sdpa", torch.device("cpu"), torch.bfloat16)
        show(
            f"{name} {asked.mode}",
            first_graph(subject, asked.mode == "train"),
            options,
            asked.threads,
        )


if __name__ == "__main__":
    main()
