"""The `fusion.*` options of torch.compile: what the user wants."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

GATES = ("auto", "measure", "table", "always", "never")
DISABLED = contextvars.ContextVar("fusion_disabled", default=False)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks for, by `fusion.<name>` in torch.compile's options.

    only, skip: names of patterns.
    limit: how many sites may be fused in one graph; bisects a wrong answer to one rewrite.
    gate: "auto", where it pays: as measured in the graph, now or by an earlier process; "measure",
    everything that can be measured is, for as long as it takes; "table", only by what ships with
    the package, so that builds are the same everywhere; "always", wherever it is possible; "never",
    report only.
    measure_s: the seconds that a process may spend on measuring under "auto": a quarter of them on
        one graph, half in training, and more on a large one. With 0, sites that were not measured
        before are decided by tables alone.
    exact_masks: no finite fill of a mask, such as -1e9, is taken for -inf.
    verify: a graph with fused sites stays only where, on its first inputs, it computes what plain
    Inductor's does and is not slower.
    dump: a directory, in which each pass writes what it has made, as text.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    limit: int | None = None
    gate: str = "auto"
    # no part of a cache's key
    measure_s: float = dataclasses.field(default=20.0, repr=False)
    exact_masks: bool = False
    # no part of a cache's key, as the next
    verify: bool = dataclasses.field(default=False, repr=False)
    dump: str | None = dataclasses.field(default=None, repr=False)


def parse(options: Mapping[str, Any] | None, known: list[str]) -> tuple[Options, dict[str, Any]]:
    """Split torch.compile's options into ours and Inductor's. Raises ValueError naming what is
    valid.
    """
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key.startswith("fusion."):
            ours[key.removeprefix("fusion.")] = value
        else:
            theirs[key] = value
    valid = [f.name for f in dataclasses.fields(Options)]
    for key in ours:
        if key not in valid:
            raise ValueError(
                f"unknown option fusion.{key}; valid are {', '.join('fusion.' + v for v in valid)}"
            )
    for key in ("only", "skip"):
        if key in ours:
            ours[key] = names(key, ours[key], known)
    limit = ours.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(f"fusion.limit is {limit!r}; it must be a number of sites, 0 or more")
    for key in ("exact_masks", "verify"):
        if not isinstance(ours.get(key, False), bool):
            raise ValueError(f"fusion.{key} is {ours[key]!r}; it must be True or False")
    if ours.get("dump") is not None:
        if not isinstance(ours["dump"], (str, os.PathLike)):
            raise ValueError(f"fusion.dump is {ours['dump']!r}; it must be a directory")
        ours["dump"] = os.fspath(ours["dump"])
    seconds = ours.get("measure_s", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"fusion.measure_s is {seconds!r}; it must be seconds, 0 or more")
    if ours.get("gate", "auto") not in GATES:
        raise ValueError(f"fusion.gate is {ours['gate']!r}; valid are {', '.join(GATES)}")
    return Options(**ours), theirs


def names(key: str, value: object, known: list[str]) -> tuple[str, ...]:
    listed = [v.strip() for v in value.split(",") if v.strip()] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple, set)) or not all(isinstance(v, str) for v in listed):
        raise ValueError(f"fusion.{key} is {value!r}; it must be pattern names")
    for name in listed:
        if name not in known:
            raise ValueError(f"fusion.{key} names {name!r}; known patterns are {', '.join(known)}")
    return tuple(sorted(listed))


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Compile as plain Inductor would: graphs compiled inside are handed on untouched.

    Functions that were compiled before keep what they have.
    """
    token = DISABLED.set(True)
    try:
        yield
    finally:
        DISABLED.reset(token)
