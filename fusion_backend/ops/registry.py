"""The rules that graphs are searched for, and the ops that have a torch operator, by name."""

from __future__ import annotations

import contextlib
import contextvars
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_backend.reporting.reject import PatternError
from fusion_backend.reporting.report import warn_once

if TYPE_CHECKING:
    from fusion_backend.ops.definition import Definition
    from fusion_backend.ops.op import Op
    from fusion_backend.ops.rule import Rule

FUSION_RULES: dict[str, Rule] = {}  # in the order in which rules of equal size are tried
OPS: dict[str, Op] = {}
LEAVES_CLASHES_OUT = contextvars.ContextVar("fusion_leaves_clashes_out", default=False)


def register(new: Definition, *registries: dict) -> None:
    """Add a definition. One that is run again (a notebook's cell, a module reloaded) replaces the
    first.

    Raises PatternError where another definition has the name; inside `clashes_left_out` that is a
    warning.
    """
    old = named(new.name)
    why = clash(old, new)
    if why and LEAVES_CLASHES_OUT.get():
        warn_once(f"name {new.where}", f"fusion: {new.where}: {why}; it is left out")
        return
    if why:
        raise PatternError(f"{new.where}: {why}")
    if old is not None and any(registry.get(new.name) is not old for registry in registries):
        unregister(new.name)
    retire(old)
    for registry in (FUSION_RULES, OPS):
        if any(registry is r for r in registries):
            registry[new.name] = new
        else:
            registry.pop(new.name, None)


def named(name: str) -> Definition | None:
    return FUSION_RULES.get(name) or OPS.get(name)


def clash(old: Definition | None, new: Definition) -> str:
    """Why the name of a new definition cannot be used; empty if it can."""
    if old is None:
        stem = new.name.removesuffix("_backward")
        other = named(stem) if stem != new.name else None
        return f"the name is that of the gradient of {other.where}" if other else ""
    if old.reference.__code__ is new.reference.__code__:
        return (
            "this definition has made a pattern before, and the name would stand for both: a "
            "function that makes patterns gives each a name of its own "
            "(`reference.__name__ = ...` before `Pattern(reference)`), or calls "
            f"fusion_backend.ops.registry.unregister({new.name!r}) first"
        )
    return "" if run_again(old, new) else f"the name is taken by {old.where}"


def run_again(old: Definition, new: Definition) -> bool:
    """Has the code that defined `old` been run again: a notebook cell, edited or not, or a file
    that is loaded again?
    """
    before, now = old.reference.__globals__, new.reference.__globals__
    if before is now and ("__file__" not in now or not Path(new.file).is_file()):
        return True  # a notebook or a prompt, where the name is bound again
    # `reload` keeps a module's globals and gives it another spec; other ways to run a file give it
    # other globals.
    same = old.file == new.file and before.get("__name__") == now.get("__name__")
    return same and (before is not now or old.spec is not new.spec)


def retire(old: Definition | None) -> None:
    """Remove the operators of a definition that is no longer registered."""
    operator = old.memo.pop("operator", None) if old is not None else None
    if operator is not None:
        operator.remove()


def unregister(name: str) -> None:
    """Forget a rule, an op or a pattern (tests and notebooks)."""
    retire(FUSION_RULES.pop(name, None))
    retire(OPS.pop(name, None))


def registered(definition: Definition) -> bool:
    """Is the definition registered? No if another definition has its name."""
    return (named(definition.name) or definition) is definition


@contextlib.contextmanager
def clashes_left_out():
    """Inside, a definition whose name is taken is left out, with a warning; its file goes on."""
    token = LEAVES_CLASHES_OUT.set(True)
    try:
        yield
    finally:
        LEAVES_CLASHES_OUT.reset(token)
