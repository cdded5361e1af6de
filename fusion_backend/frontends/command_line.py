"""python -m fusion_backend: explain a model, check the installation, print the catalogue."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys

import torch
import triton

from fusion_backend.frontends.catalogue import catalogue
from fusion_backend.frontends.loading import patterns
from fusion_backend.ir import counts
from fusion_backend.match.templates import backward_of, templates
from fusion_backend.reporting.reject import PatternError
from fusion_backend.reporting.report import Report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusion_backend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explained = commands.add_parser("explain", help="what would fuse in your model, and why not")
    explained.add_argument("target", help="package.module:function that returns (model, inputs)")
    explained.add_argument("--json", action="store_true", help="machine-readable")
    explained.add_argument("--rules", action="store_true", help="counts and times of the rules")
    explained.add_argument("--gate", default="auto", choices=("auto", "always", "never"))
    commands.add_parser("doctor", help="versions, devices, patterns: what a bug report needs")
    commands.add_parser("catalogue", help="docs/catalogue.md, on standard output")
    arguments = parser.parse_args(argv)
    if arguments.command == "explain":
        return explain_target(arguments)
    print(catalogue(patterns()) if arguments.command == "catalogue" else doctor(), end="")
    return 0


def explain_target(arguments) -> int:
    from fusion_backend import explain

    module, _, name = arguments.target.partition(":")
    sys.path.insert(0, "")
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        print(
            f"cannot load {arguments.target}: {error}; expected package.module:function",
            file=sys.stderr,
        )
        return 2
    model, inputs = build()
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    report = explain(model, *inputs, options={"fusion.gate": arguments.gate})
    print(report.to_json() if arguments.json else report)
    if arguments.rules:
        print(rules_table(report))
    return 0


def rules_table(report: Report) -> str:
    """How often each rule was asked and applied, and its milliseconds: those of patterns, graph by
    graph, and the canonical ones, of this process; the dearest first.
    """
    parts = [graph.rules_table() for graph in report.graphs]
    lines = ["canonical rule                            asked  applied       ms"]
    for c in sorted(counts(), key=lambda c: -c.seconds):
        name = f"{c.subject} ({c.rule})"
        lines.append(f"{name[:40]:40} {c.asked:6} {c.applied:8} {c.seconds * 1e3:8.2f}")
    return "\n".join([*parts, *lines])


def doctor() -> str:
    registered = "fusion" in torch.compiler.list_backends()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none; no kernels"
    lines = [
        f"python {platform.python_version()}, torch {torch.__version__}, triton "
        f"{triton.__version__}",
        f"GPU: {gpu}",
        f"backend registered: {'yes' if registered else 'no, is the package installed?'}",
    ]
    for p in patterns():
        try:
            kernel = "yes" if getattr(p, "kernel_fn", None) else "no"
            state = f"{len(templates(p))} templates, kernel {kernel}"
            state += f", backward {backward_of(p)}"
        except PatternError as error:
            state = f"broken: {error}"
        lines.append(f"pattern {p.name}: {state}")
    return "\n".join(lines) + "\n"
