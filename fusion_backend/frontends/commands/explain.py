"""`fusion explain SPEC`: what the backend would do to your model, without compiling it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import torch

from fusion_backend.compat.torch import refusals_unlogged
from fusion_backend.frontends.commands.asked_model import DTYPES, asked_for
from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.explain import classes_of, explain
from fusion_backend.frontends.own_model import OwnModel, where
from fusion_backend.frontends.run_unchanged import untouched
from fusion_backend.ir import counts
from fusion_backend.kernels.common.target import GPUS
from fusion_backend.options import GATES
from fusion_backend.reporting.report import Report
from fusion_backend.reporting.text import IN_SHELL, terminal_width, text_of

DESCRIPTION = """Run your model once, without compiling it, and say what would be fused in it, what
would not, and why. SPEC names a function without arguments that returns (model, inputs) or (model,
inputs, loss); inputs are a tensor, a tuple or list of positional arguments, or a dict of keyword
arguments. The model is explained as it runs under torch.no_grad(), in the mode in which build()
leaves it; with --train as it trains, the loss included."""

META = (
    "; with --meta, every tensor that the model makes or holds must be on the meta device: give "
    "generating models of transformers use_cache=False"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", metavar="SPEC", help="path/to/file.py:build or package.module:build")
    train = "explain the training step: with gradients, and with the loss where build returns one"
    add("--train", action="store_true", help=train)
    gate = "the option fusion.gate: what decides; nothing is measured (see docs/gate.md)"
    add("--gate", default="auto", choices=GATES, help=gate)
    add("--dtype", choices=DTYPES, help="cast model and inputs; default: as build() makes them")
    add("--dynamic", action="store_true", help="sizes vary, as torch.compile(dynamic=True) has it")
    target = "decide as on this GPU, whatever this machine has"
    add("--target", choices=GPUS, help=target)
    meta = "build on the meta device: no weights and no memory, for any size; needs --target"
    add("--meta", action="store_true", help=meta)
    add("--verbose", action="store_true", help="near misses and everything else that is known")
    add("--rules", action="store_true", help="also how often each rule was tried, and for how long")
    add("--json", action="store_true", help="the report as JSON")
    add("--html", type=Path, metavar="FILE", help="also write the report as a page")


def run(arguments: argparse.Namespace) -> int:
    if arguments.html and not arguments.html.parent.is_dir():
        raise Failure(f"--html: there is no folder {arguments.html.parent}", 2)
    if arguments.meta and not arguments.target:
        raise Failure("--meta needs --target: no GPU is asked about", 2)
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("meta" if arguments.meta else usual)
    made = asked_for(arguments, device)
    report = explained(made, arguments)
    if made.loss and not arguments.train:
        told = "explained in inference, without the loss; --train explains the training step"
        print(f"fusion explain: {told}", file=sys.stderr)
    if arguments.html:
        arguments.html.write_text(report.to_html(), encoding="utf-8")
    as_text = text_of(report, arguments.verbose, terminal_width(), IN_SHELL)
    print(report.to_json() if arguments.json else as_text)
    if arguments.rules:
        print(rules_table(report), file=sys.stderr if arguments.json else sys.stdout)
    return 0


def explained(made: OwnModel, arguments: argparse.Namespace) -> Report:
    """The report of a model. Raises Failure with the model's own error where it has one."""
    step, quiet = made.step(arguments.train), refusals_unlogged
    if arguments.traceback:
        quiet = contextlib.nullcontext
    try:
        with torch.set_grad_enabled(arguments.train), quiet():
            report = explain(
                step,
                *made.args,
                kwargs=made.kwargs,
                options={"fusion.gate": arguments.gate},
                dynamic=True if arguments.dynamic else None,
                target=arguments.target,
            )
    except Exception as error:
        own, hint = eager_error(made, arguments.train), META if arguments.meta else ""
        if own is not None:
            told = f"{made.name} run on its inputs raised {where(own, made.build)}"
            raise Failure(told + hint, 1) from own
        told = f"{made.name} runs, explaining it raised {where(error)}"
        raise Failure(told + hint, 1) from error
    report.modules = classes_of(made.model)  # also if the loss is explained with it
    return report


def eager_error(made: OwnModel, train: bool) -> Exception | None:
    """The exception that the model raises without the backend, if any."""
    try:
        with untouched(made.model, made.args, made.kwargs), torch.set_grad_enabled(train):
            made.step(train)(*made.args, **made.kwargs)
    except Exception as error:
        return error
    return None


def rules_table(report: Report) -> str:
    """How often each rule was asked and applied, and its milliseconds: for patterns, by graph; for
    canonical rules, in this process; the slowest first.
    """
    parts = [graph.rules_table() for graph in report.graphs]
    lines = ["canonical rule                            asked  applied       ms"]
    for c in sorted(counts(), key=lambda c: -c.seconds):
        name = f"{c.subject} ({c.rule})"
        lines.append(f"{name[:40]:40} {c.asked:6} {c.applied:8} {c.seconds * 1e3:8.2f}")
    return "\n".join([*parts, *lines])
