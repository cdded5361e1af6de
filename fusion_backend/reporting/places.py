"""Where a node comes from: the user's line, the module, and short forms of both for people."""

from __future__ import annotations

import os
import re

from torch import fx

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# Code that is not the user's: torch's, and the training step that `fusion explain` wraps.
INSIDE = re.compile(
    r"[/\\]torch[/\\](nn|_|functional|utils|ao|func|amp|distributed)|fusion_backend[/\\]frontends[/\\]"
)
# Dynamo's name of a module begins with the variable that it was found in: L['self'].layers.0.norm,
# where a local variable is the model, whatever its name, and a global one is named.
VARIABLE = re.compile(r"^(?P<kind>[LG])\['(?P<name>\w+)'\]\.?")
PATH = re.compile(r"(?P<path>(?:/|[A-Za-z]:\\)[^\s:\"']+\.py)(?=:\d+)")
INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
DOTTED = re.compile(r"\b\w+(?:\.\w+)+\b")


def location(node: fx.Node) -> str:
    """The user's file:line that a node comes from: the innermost frame outside of torch. Code of
    torch itself, such as that of nn.Sequential, is named by its module.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    users = [f for f in frames if not INSIDE.search(f[0])]
    if users:
        return f"{users[-1][0]}:{users[-1][1]}"
    if module := module_of(node):
        return named(module)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else node.name


def named(module: str) -> str:
    """A module's path for a sentence: "module 1", because a number alone says nothing."""
    return f"module {module}" if module.isdigit() or module == "*" else module


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that a node was computed in, such as "layers.0.norm1"; ""
    for the model itself and outside of modules.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    variable = VARIABLE.match(path)
    if variable is None:
        return path
    rest = path[variable.end() :]
    return rest if variable["kind"] == "L" else f"{variable['name']}.{rest}".rstrip(".")


def short(text: str) -> str:
    """A text with the paths in it shortened: relative to the current folder, or to the folder that
    packages are installed in.
    """
    here = os.getcwd().rstrip("/\\") + os.sep

    def shortened(found: re.Match[str]) -> str:
        path: str = INSTALLED.sub("", found["path"])
        return path.removeprefix(here)

    return PATH.sub(shortened, text)


def folded(text: str) -> str:
    """A text with "*" for the numbers in paths of modules: layers.*.norm1."""

    def without_numbers(found: re.Match[str]) -> str:
        parts = found[0].split(".")
        if all(part[0].isdigit() for part in parts):  # a number, such as 0.98
            return found[0]
        return ".".join("*" if part.isdigit() else part for part in parts)

    return DOTTED.sub(without_numbers, text)
