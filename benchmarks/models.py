"""Whole models under eager, plain Inductor and this backend: step time, compile time, memory,
errors, kernels.

    python -m benchmarks.models --model plain_llama llama bert --mode infer train [--out FILE.json] [--trace DIR]
    python -m benchmarks.models --module path/to/file.py:build --mode train       # your own model
    python -m benchmarks.models --timm resnet50

Random weights, the same for all contenders, which take turns in one process. A training step is
forward (with the loss, compiled together), backward, and with --optimizer its step. Errors are
against the same weights in --exact. Sizes are realistic on a GPU and tiny on a CPU, where times
mean nothing and every site that can be is rewritten (--gate always): --size full overrides. Exit
status: 0, or 1 when a contender failed or was wrong, 2 when the arguments make no sense, 130 after
Ctrl-C; what was measured is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import sys
import time
from pathlib import Path

import torch

from benchmarks import own_model
from benchmarks.measure import said
from benchmarks.model_run import DTYPES, Plan, contenders, measure
from benchmarks.model_table import text
from benchmarks.model_zoo import ENTRIES, INFER, MODES, TRAIN, Problem, Subject, build
from benchmarks.options import duration, output, positive
from benchmarks.readme import quoted_names
from benchmarks.results import OK, ModelRow, Run, machine

EXACT = {"fp32": torch.float32, "fp64": torch.float64, "none": None}
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("batch", "seq", "layers")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(ENTRIES)}"
    )
    parser.add_argument(
        "--module", nargs="+", default=[], metavar="MODULE:BUILD", help="your own; see own_model.py"
    )
    parser.add_argument("--timm", nargs="+", default=[], metavar="NAME", help="models of timm")
    parser.add_argument(
        "--quoted", type=Path, metavar="PAGE.md", help="the models whose figures a page gives"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=MODES,
        default=[INFER],
        help="decode: one token, seq - 1 cached",
    )
    for name in SIZES:
        parser.add_argument(
            f"--{name}",
            type=positive,
            metavar="N",
            help="instead of the model's own (not --module)",
        )
    parser.add_argument(
        "--size", choices=("full", "tiny"), help="default: full on a GPU, tiny on a CPU"
    )
    parser.add_argument(
        "--dtype",
        choices=NAMES,
        help="default: bf16 on a GPU, fp32 on a CPU; --module: as it is built",
    )
    parser.add_argument(
        "--attention", choices=("sdpa", "eager"), default="sdpa", help="by torch, or written out"
    )
    parser.add_argument(
        "--gate",
        choices=("auto", "always", "never"),
        help="fusion.gate (default: auto; CPU: always)",
    )
    parser.add_argument(
        "--max-autotune", action="store_true", help="a contender more; slow to compile"
    )
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), help="part of a training step")
    parser.add_argument(
        "--dropout",
        action="store_true",
        help="train with the model's own (no errors: it is random)",
    )
    parser.add_argument(
        "--exact",
        choices=EXACT,
        help="dtype that errors are against (default: fp32, of fp32: fp64)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="compile once, with an empty cache: no warm compile time",
    )
    parser.add_argument("--rounds", type=positive, default=11, metavar="N")
    parser.add_argument(
        "--least-ms", type=float, default=50, metavar="MS", help="of a contender's turn in a round"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write a Chrome trace a contender; show top kernels",
    )
    parser.add_argument(
        "--no-profile", action="store_true", help="no kernels: for a run under nsys or ncu"
    )
    parser.add_argument("--minutes", type=duration, help="begin no model that would take longer")
    parser.add_argument(
        "--out", type=output, metavar="FILE", help="write the results as JSON, after each model"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what FILE has of other models: a run in parts"
    )
    args = parser.parse_args(argv)
    try:
        args.jobs = asked(args)
    except ValueError as error:
        parser.error(str(error))
    if not args.jobs:
        parser.error("nothing to measure: give --model, --module or --timm")
    if args.add and not args.out:
        parser.error("--add keeps what the file has: give --out")
    if args.trace and args.no_profile:
        parser.error("--trace is written by the profiler that --no-profile leaves out")
    if args.optimizer and all(mode != TRAIN for _, _, mode in args.jobs):
        parser.error("--optimizer is part of a training step: give --mode train")
    if args.dropout and (args.module or any(mode != TRAIN for _, _, mode in args.jobs)):
        parser.error(
            "--dropout is for --mode train of --model and --timm; one of --module has its own mode"
        )
    if args.dropout and args.exact not in (None, "none"):
        parser.error(
            "--dropout draws other numbers in every contender: there are no errors to show, --exact none"
        )
    return args


def asked(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """What is to be measured: whose model, its name, the mode. ValueError where there is no such
    model.
    """
    pairs = quoted_names(args.quoted, "models") if args.quoted else []
    jobs = [("model", *pair.split(" ", 1)) for pair in pairs]
    names = [(kind, name) for kind in ("model", "module", "timm") for name in getattr(args, kind)]
    jobs += [(kind, name, mode) for kind, name in names for mode in args.mode]
    if unknown := sorted({name for kind, name, _ in jobs if kind == "model"} - set(ENTRIES)):
        raise ValueError(f"no model {', '.join(unknown)}; there is {', '.join(ENTRIES)}")
    return jobs


def subject_of(
    kind: str, name: str, mode: str, args: argparse.Namespace, device: torch.device
) -> Subject:
    dtype = (
        NAMES[args.dtype]
        if args.dtype
        else torch.bfloat16
        if device.type == "cuda"
        else torch.float32
    )
    if mode not in (INFER, TRAIN) and kind != "model":
        raise Problem(f"{name}: there is no mode {mode} for --{kind}")
    if kind == "module":
        return own_model.own(name, mode, device, NAMES[args.dtype] if args.dtype else None)
    if kind == "timm":
        return own_model.timm(
            name, mode, device, dtype, args.batch or (2 if device.type == "cpu" else 64)
        )
    full = args.size == "full" or (args.size is None and device.type == "cuda")
    size = ENTRIES[name].full if full else ENTRIES[name].tiny
    size = dataclasses.replace(
        size, **{key: getattr(args, key) for key in SIZES if getattr(args, key)}
    )
    return build(name, mode, size, args.attention, device, dtype)


def measured(
    kind: str, name: str, mode: str, args: argparse.Namespace, device: torch.device, say
) -> ModelRow:
    """The row of a model in a mode; without contenders where it cannot be built, and a note why."""
    row = ModelRow(name, mode, "", {}, None, [])
    say("building")
    try:
        subject = subject_of(kind, name, mode, args, device)
    except Problem as problem:
        row.notes.append(f"not measured: {problem}")
        return row
    except Exception as error:  # of a library, or out of memory: the other models go on
        row.notes.append(f"not measured: building it raised {said(error)}")
        return row
    row.name = subject.name
    if args.dropout:
        subject.model.train()
    kinds = [x.dtype for x in subject.model.parameters() if x.is_floating_point()] or [
        torch.float32
    ]
    row.dtype = next(word for word, dtype in DTYPES.items() if dtype == kinds[0])
    gate = args.gate or ("auto" if device.type == "cuda" else "always")
    row.about = subject.about | dict(
        attention=args.attention if kind == "model" else None,
        optimizer=args.optimizer if mode == TRAIN else None,
        dropout="on" if args.dropout else None,
        gate=gate,
        parameters=sum(p.numel() for p in subject.model.parameters()),
    )
    exact = (
        EXACT[args.exact]
        if args.exact
        else torch.float32
        if kinds[0].itemsize < 4
        else torch.float64
    )
    exact = None if args.dropout else exact
    plan = Plan(
        train=mode == TRAIN, optimizer=row.about["optimizer"], cold=not args.once, exact=exact,
        rounds=args.rounds,
        least_ms=args.least_ms, profile=not args.no_profile, trace=args.trace,
    )  # fmt: skip
    try:
        return measure(subject, contenders(gate, args.max_autotune), plan, row, device, say)
    except Exception as error:
        row.notes.append(f"stopped: {own_model.where(error)}")
        return row


class Status:
    """What goes on, on stderr: one line that changes on a terminal, a line each elsewhere."""

    def __init__(self):
        self.start, self.head, self.live = time.perf_counter(), "", sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        line = f"{time.perf_counter() - self.start:5.0f} s  {self.head}: {what}"
        print(
            f"\r\033[K{line}" if self.live else line,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def replaces(new: ModelRow, old: ModelRow) -> bool:
    """The same model with the same sizes, or one that could not be measured before."""
    return (
        old.title == new.title
        or not old.contenders
        and (old.name, old.mode) == (new.name, new.mode)
    )


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> int:
    begun = time.monotonic()
    args = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine(device, "benchmarks.models") | dict(transformers=installed("transformers"))
    run, status = Run("models", about), Status()
    if argv is not None:
        run.about["command"] = " ".join(["python -m benchmarks.models", *argv])
    try:
        if args.add:
            run.go_on_from(args.out)
    except ValueError as error:
        print(f"benchmarks.models: {error}", file=sys.stderr)
        return 2
    print(f"{run.about['gpu'] or 'CPU: the times below mean nothing'}, torch {torch.__version__}")
    mine, longest, jobs = [], 0.0, args.jobs
    try:
        for i, (kind, name, mode) in enumerate(jobs, 1):
            now = time.monotonic()
            if args.minutes and mine and now + longest > begun + args.minutes * 60:
                run.about["stopped"] = f"time is up after {len(mine)} of {len(jobs)} models"
                break
            status.head = f"{i}/{len(jobs)} {name} {mode}"
            mine.append(measured(kind, name, mode, args, device, status))
            longest = max(longest, time.monotonic() - now)
            run.rows = [row for row in run.rows if not replaces(mine[-1], row)] + [mine[-1]]
            status.clear()
            print(f"\n{text(run.rows[-1])}", flush=True)
            if args.trace:
                show_kernels(run.rows[-1], args.trace)
            if args.out:
                run.save(args.out)
    except KeyboardInterrupt:
        run.about["stopped"] = f"by Ctrl-C in {status.head}"
    status.clear()
    run.about["seconds"] = round(time.monotonic() - begun, 1)
    if args.out and mine:
        run.save(args.out)
    if stopped := run.about.get("stopped"):
        print(f"\nstopped: {stopped}; {len(mine)} of {len(jobs)} measured", file=sys.stderr)
    if "Ctrl-C" in (stopped or ""):
        return 130
    fine = all(
        row.contenders and all(one.status == OK and one.step for one in row.contenders)
        for row in mine
    )
    return 0 if fine else 1


def show_kernels(row: ModelRow, folder: Path) -> None:
    for one in row.contenders:
        if one.kernels:
            print(f"  longest kernels of {one.name}")
        for kernel in one.kernels:
            share = kernel["ms"] / one.device_ms
            print(
                f"  {kernel['ms']:10.4f} ms {share:6.1%}  {kernel['kind']:26}{kernel['name'][:80]}"
            )
    print(f"  traces in {folder}: open them in https://ui.perfetto.dev or chrome://tracing")


if __name__ == "__main__":
    sys.exit(main())
