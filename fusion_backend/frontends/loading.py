"""All rules: the built-in ones, those of installed packages, and those of the user."""

from __future__ import annotations

import importlib.metadata
import threading

from fusion_backend.compat.torch import refusals_unlogged
from fusion_backend.match.templates import renew, templates
from fusion_backend.ops.extension import EXTENSIONS
from fusion_backend.ops.registry import FUSION_RULES, clashes_left_out
from fusion_backend.ops.rule import Rule
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.reject import PatternError

LOADED: list[str] = []
LOADING = threading.RLock()  # a pattern's file may itself ask for the patterns


def patterns() -> list[Rule]:
    """All usable patterns in order of registration; loads the built-in and the installed ones at
    first use.

    A second thread waits until all are loaded.
    """
    with LOADING:
        load()
        return list(FUSION_RULES.values())


def names() -> list[str]:
    """Of all patterns, and of the ops that extend their matches: what options may name."""
    return [*(p.name for p in patterns()), *EXTENSIONS]


def load() -> None:
    if not LOADED:
        LOADED.append("fusion_backend.patterns")
        try:
            import fusion_backend.patterns  # noqa: F401
        except Exception as error:
            reporting.warn_once(
                "built-in", f"fusion: the built-in patterns cannot be loaded: {error}"
            )
        for entry in importlib.metadata.entry_points(group="fusion_backend.patterns"):
            try:
                with clashes_left_out():
                    entry.load()
            except Exception as error:
                reporting.warn_once(
                    entry.name, f"fusion: patterns of {entry.value} cannot be loaded: {error}"
                )


def usable(known: list[Rule]) -> list[Rule]:
    """The patterns that can be traced; a broken one costs a warning, not the model."""
    good = []
    with refusals_unlogged():
        for p in known:
            try:
                renew(p)
                templates(p)
                good.append(p)
            except PatternError as error:
                reporting.warn_once(f"pattern {p.name}", f"fusion: {error}; it is left out")
    return good
