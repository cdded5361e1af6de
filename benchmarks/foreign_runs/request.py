"""What a command line of benchmarks.foreign asks for."""

from __future__ import annotations

import argparse
import ast
import os
import re

from benchmarks.foreign_code.listed import graphs
from benchmarks.foreign_code.problems import Graph
from fusion_backend.frontends.loading import patterns
from fusion_backend.options import parse


def shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not 1/2 or its like")
    return int(found[1]), int(found[2])


def option(text: str) -> tuple[str, object]:
    """fusion.name=value; the value is a Python literal, or else the text."""
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("fusion."):
        raise argparse.ArgumentTypeError(f"{text} is not fusion.name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def options(gate: str, given: list[tuple[str, object]]) -> dict:
    """What torch.compile is told. ValueError names an option that this checkout does not have."""
    found = {"fusion.gate": gate} | dict(given)
    parse(found, [pattern.name for pattern in patterns()])
    return found


def selected(only: str | None, part: tuple[int, int]) -> dict[str, Graph]:
    """The graphs whose name, family or source matches the expression, and of those every nth, in
    the order in which they are measured. ValueError where there is none.
    """
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise ValueError(f"--only {only}: {error}") from None
    found = {
        name: graph
        for name, graph in graphs().items()
        if any(map(wanted.search, (name, graph.problem.family, graph.problem.source)))
    }
    names = list(found)[part[0] - 1 :: part[1]]
    if not names:
        raise ValueError("there is no such graph; --list shows all of them")
    return {name: found[name] for name in names}


def processes(on_gpu: bool) -> int:
    """One a core, but for two; without a GPU one."""
    return max(1, min(14, (os.cpu_count() or 2) - 2)) if on_gpu else 1
