"""The result of check_pattern, in sentences, and errors that name the function and its line."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection

from fusion_backend.ops.definition import Definition
from fusion_backend.reporting.reject import PatternError

WATCHED = {"guard_fn": "guard", "replacement_fn": "replacement", "kernel_fn": "kernel",
    "saved_fn": "saved",
           "seeded_fn": "seeded reference", "backward_fn": "backward"}  # fmt: skip


@dataclasses.dataclass
class Proof:
    """What check_pattern ran (`checked`), and what it did not run and why (`not_run`), as sentences
    that begin with their subject. `str` lists them.
    """

    pattern: str
    checked: list[str] = dataclasses.field(default_factory=list)
    not_run: list[str] = dataclasses.field(default_factory=list)

    def __str__(self):
        checked = [f"{self.pattern}: checked", *(f"  {line}" for line in self.checked)]
        return "\n".join(
            checked + (["not run", *(f"  {line}" for line in self.not_run)] if self.not_run else [])
        )


def line_of(fn: Callable) -> int:
    return inspect.unwrap(fn).__code__.co_firstlineno


def in_forms(some: Collection, of_all: Collection) -> str:
    """Forms in words: by name where they are few and not all."""
    if len(some) == len(of_all):
        return "in its one form" if len(of_all) == 1 else f"in all {len(of_all)} forms"
    if len(some) <= 3:
        return "in " + " and ".join(f"({', '.join(kinds)})" for kinds in some)
    return f"in {len(some)} of {len(of_all)} forms"


def raised(
    pattern: Definition, what: str, fn: Callable, error: Exception, where: str = ""
) -> PatternError:
    return PatternError(
        f"{pattern.where}: the {what} at line {line_of(fn)} raised "
        f"{type(error).__name__}{where}: {error}"
    )


def typo(error: Exception) -> bool:
    """Is it a name that does not exist? An attribute that None or a number does not have is no
    typo: the argument is a tensor in another form.
    """
    if isinstance(error, AttributeError):
        return error.name is None or not isinstance(error.obj, (type(None), int, float, str))
    return isinstance(error, (NameError, ImportError, SyntaxError))


@dataclasses.dataclass
class Calls:
    """What the functions of a pattern returned, in order, and what they raised."""

    answers: dict[str, list] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    errors: list[PatternError] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watched(pattern: Definition):
    """Record the calls of a pattern's functions; what they raise becomes a PatternError that names
    the function and its line.
    """
    calls, real = (
        Calls(),
        {name: getattr(pattern, name) for name in WATCHED if hasattr(pattern, name)},
    )

    def recorded(name: str, fn: Callable) -> Callable:
        @functools.wraps(fn)
        def call(*args):
            try:
                answer = fn(*args)
            except Exception as error:
                calls.errors.append(raised(pattern, WATCHED[name], fn, error))
                raise calls.errors[-1] from error
            calls.answers[name].append(answer)
            return answer

        return call

    try:
        for name, fn in real.items():
            setattr(pattern, name, fn and recorded(name, fn))
        yield calls
    finally:
        for name, fn in real.items():
            setattr(pattern, name, fn)
