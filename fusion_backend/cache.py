"""What identifies us in Inductor's caches: a pass that does nothing, whose uuid is everything we changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from fusion_backend.pattern import Pattern
from fusion_backend.torch_api import CustomGraphPass, pass_slot


class Identity(CustomGraphPass):
    """Chained in front of the pass that the user configured, if any."""

    def __init__(self, key: str, inner: Callable | None = None):
        self.key, self.inner = key, inner

    def __call__(self, graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self):
        if self.inner is None:
            return self.key
        theirs = self.inner.uuid() if isinstance(self.inner, CustomGraphPass) else None
        return (self.key, theirs) if theirs else None  # without an identity of theirs torch must not cache


def with_identity(options: dict, key: str) -> dict:
    """Inductor options that carry our identity."""
    slot, theirs = pass_slot(options)
    return {**options, slot: Identity(key, theirs)}


def key_of(patterns: list[Pattern], decisions: list[str]) -> str:
    """A digest of the sources behind the patterns in use, our own sources, and the decisions."""
    digest = hashlib.sha256(own_sources().encode())
    for p in sorted(patterns, key=lambda p: p.name):
        digest.update(source_of(p).encode())
    for line in decisions:
        digest.update(line.encode())
    return digest.hexdigest()


@functools.cache
def own_sources() -> str:
    here = Path(__file__).parent
    return "\n".join(f.read_text() for f in sorted(here.rglob("*.py")))


def source_of(pattern: Pattern) -> str:
    """The text of the file that a pattern is defined in; of its functions where there is no file (a notebook)."""
    module = sys.modules.get(pattern.reference.__module__)
    file = getattr(module, "__file__", None) or pattern.file
    if Path(file).is_file():
        return Path(file).read_text()
    functions = [*pattern.spellings, pattern.kernel_fn, pattern.backward_fn, pattern.saved_fn, pattern.guard_fn]
    return "\n".join(text(f) for f in functions if f is not None)


def text(fn: Callable) -> str:
    try:
        return inspect.getsource(fn)
    except (OSError, TypeError):
        return fn.__code__.co_code.hex() + repr(fn.__code__.co_consts)
