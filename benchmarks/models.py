"""Whole models under eager, plain Inductor and this backend: step time, compile time, memory,
errors, kernels.

    python -m benchmarks.models --model plain_llama bert --mode infer train [--out FILE.json]
    python -m benchmarks.models --module path/to/file.py:build --mode train       # your own model
    python -m benchmarks.models --timm resnet50

The weights are random and the same for all contenders, which take turns in one process. With
--processes N models compile at the same time, and whoever is timed is alone on the GPU. A training
step is forward (with the loss, compiled together), backward, and with --optimizer the optimizer's
step. Errors are against the same weights in the dtype of --exact. Sizes are realistic on a GPU and
tiny on a CPU, where times mean nothing and every site that can be rewritten is (--gate always);
--size full overrides that. Exit status: 0; 1 when a contender failed or was wrong; 2 when the
arguments make no sense; 130 after Ctrl-C. What was measured until then is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.command_line.options import duration, output, positive
from benchmarks.command_line.status import Status
from benchmarks.model_runs.request import asked, finish, measure_all, refused
from benchmarks.model_runs.row import EXACT, NAMES, SIZES
from benchmarks.records.runs import Run, installed, machine
from benchmarks.subjects.model_zoo import ENTRIES
from benchmarks.subjects.subject import INFER, MODES
from fusion_backend.options import GATES

COMMAND = "python -m benchmarks.models"


def arguments(argv: list[str] | None, prog: str = COMMAND) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser.add_argument)
    add_contenders(parser.add_argument)
    add_measurements(parser.add_argument)
    add_files(parser.add_argument)
    args = parser.parse_args(argv)
    try:
        args.jobs = asked(args)
    except ValueError as error:
        parser.error(str(error))
    if why := refused(args):
        parser.error(why)
    return args


def add_models(add) -> None:
    add("--model", nargs="+", default=[], metavar="NAME", help=f"some of {', '.join(ENTRIES)}")
    own = (
        "your own: path/to/file.py:build or package.module:build, returning (model, inputs[, loss])"
    )
    add("--module", nargs="+", default=[], metavar="SPEC", help=own)
    add("--timm", nargs="+", default=[], metavar="NAME", help="models of timm")
    add("--quoted", type=Path, nargs="+", metavar="PAGE.md", help="models whose figures pages give")
    mode = "decode: one token, with seq - 1 tokens in the cache"
    add("--mode", nargs="+", choices=MODES, default=[INFER], help=mode)
    for name in SIZES:
        add(f"--{name}", type=positive, metavar="N", help="overrides the model's (not --module)")
    add("--size", choices=("full", "tiny"), help="default: full on a GPU, tiny on a CPU")
    dtype = "default: bf16 on a GPU, fp32 on a CPU; for --module, the dtype that it is built in"
    add("--dtype", choices=NAMES, help=dtype)


def add_contenders(add) -> None:
    attention = "by torch's operator, or written out"
    add("--attention", choices=("sdpa", "eager"), default="sdpa", help=attention)
    gate = "the option fusion.gate (default: auto; on a CPU always)"
    add("--gate", choices=GATES, help=gate)
    seconds = "the option fusion.measure_s, for each model anew (default: 20)"
    add("--measure-s", type=float, default=20.0, metavar="S", help=seconds)
    unmeasured = "leave out the answers that ship with the package, as for a model of your own"
    add("--without-seed", action="store_true", help=unmeasured)
    verify = "the option fusion.verify: the compile time has what its comparison costs"
    add("--verify", action="store_true", help=verify)
    add("--max-autotune", action="store_true", help="one more contender, which compiles slowly")
    add("--optimizer", choices=("sgd", "adamw"), help="its step is part of a training step")
    dropout = "train with the model's own dropout (without errors, because it is random)"
    add("--dropout", action="store_true", help=dropout)


def add_measurements(add) -> None:
    exact = "the dtype that errors are against (default: fp32; for models in fp32: fp64)"
    add("--exact", choices=EXACT, help=exact)
    once = "compile once, with an empty cache: no warm compile time"
    add("--once", action="store_true", help=once)
    cold = (
        "compilations with an empty cache; the one with the median time counts, the shorter of two "
        "in the middle"
    )
    add("--cold", type=positive, default=1, metavar="N", help=cold)
    add("--rounds", type=positive, default=11, metavar="N", help="turns of every contender")
    least = "the least time of a contender's turn in a round"
    add("--least-ms", type=float, default=50, metavar="MS", help=least)
    trace = "write a Chrome trace for each contender and print its longest kernels"
    add("--trace", type=Path, metavar="DIR", help=trace)
    profile = "look at no kernels: for a run under nsys or ncu"
    add("--no-profile", action="store_true", help=profile)
    processes = "models that are measured at a time, each in a process of its own; with --once"
    add("--processes", type=positive, default=1, metavar="N", help=processes)
    minutes = "begin no model that would take longer than what is left of this time"
    add("--minutes", type=duration, help=minutes)


def add_files(add) -> None:
    add("--out", type=output, metavar="FILE", help="write the results as JSON after each model")
    answers = "leave what the gate measured to later processes, as `fusion gate export` finds it"
    add("--keep-answers", action="store_true", help=answers)
    parts = "keep what FILE has of other models: a run in parts"
    add("--add", action="store_true", help=parts)


def main(argv: list[str] | None = None, prog: str = COMMAND) -> int:
    begun = time.monotonic()
    args = arguments(argv, prog)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine(device, "benchmarks.models") | dict(transformers=installed("transformers"))
    run, status = Run("models", about), Status()
    if argv is not None:
        run.about["command"] = " ".join([COMMAND, *argv])
    try:
        if args.add:
            run.go_on_from(args.out)
    except ValueError as error:
        print(f"benchmarks.models: {error}", file=sys.stderr)
        return 2
    print(f"{run.about['gpu'] or 'CPU: the times below mean nothing'}, torch {torch.__version__}")
    measured = measure_all(run, args, device, status, begun)
    run.about["seconds"] = round(time.monotonic() - begun, 1)
    if args.out and measured:
        run.save(args.out)
    return finish(run, measured, len(args.jobs))


if __name__ == "__main__":
    sys.exit(main())
