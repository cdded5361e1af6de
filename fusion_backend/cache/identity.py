"""The key of a rewritten graph in Inductor's caches: the uuid of a custom pass that does nothing.

It is a digest of our sources, the patterns in use, the options and the decisions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from fusion_backend import LOADED_AT
from fusion_backend.cache.fingerprint import fingerprint
from fusion_backend.compat.torch import CustomGraphPass, pass_slot
from fusion_backend.ops.definition import Definition

PACKAGE = Path(__file__).parent.parent


class Identity(CustomGraphPass):
    """The pass with our key, which runs the user's own pass, if any. If the key is None, torch
    caches nothing.
    """

    def __init__(self, key: str | None, inner: Callable | None = None):
        self.key, self.inner = key, inner

    def __call__(self, graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self):
        if self.inner is None or self.key is None:
            return self.key
        theirs = self.inner.uuid() if isinstance(self.inner, CustomGraphPass) else None
        # if the user's pass has no identity, torch must not cache
        return (self.key, theirs) if theirs else None


def with_identity(options: dict, key: str | None) -> dict:
    """Inductor's options with our pass in the place of the user's, which it runs."""
    slot, theirs = pass_slot(options)
    return {**options, slot: Identity(key, theirs)}


def key_of(patterns: list[Definition], decisions: list[str]) -> str | None:
    """A digest of the patterns in use, our own sources, and the decisions. None where a source has
    changed since it was loaded or a pattern reaches something that has no fingerprint.
    """
    sources = own_sources()
    prints = [fingerprint(p) for p in sorted(patterns, key=lambda p: p.name)]
    if sources is None or any(f.opaque for f in prints):
        return None
    text = repr((sources, [f.digest for f in prints], decisions))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def own_sources() -> str | None:
    """A digest of our own files, the built-in patterns among them; None where one has changed since
    it was loaded.
    """
    patterns = importlib.util.find_spec("fusion_backend.patterns").submodule_search_locations
    files = [f for folder in (PACKAGE, *map(Path, patterns)) for f in sorted(folder.rglob("*.py"))]
    if max(max(f.stat().st_mtime, f.stat().st_ctime) for f in files) > LOADED_AT:
        return None
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
