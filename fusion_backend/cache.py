"""What identifies us in Inductor's caches: a pass that does nothing, whose uuid is everything we changed.

And a cache of our own: traced patterns, beside Inductor's, under the same kind of key.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path

from fusion_backend.compat.torch import CustomGraphPass, cache_folder, pass_slot, torch_version
from fusion_backend.pattern import Pattern


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


def file_of(pattern: Pattern) -> Path | None:
    """Where a traced pattern is kept; nowhere when Inductor's caches are off."""
    folder = cache_folder()
    if folder is None:
        return None
    text = f"{own_sources()}{source_of(pattern)}{pattern.where}{torch_version()}"
    return Path(folder) / "fusion" / f"{pattern.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.pkl"


def load(pattern: Pattern):
    """What was stored, or None. A file that cannot be read is as good as none."""
    try:
        return pickle.loads(file_of(pattern).read_bytes())
    except Exception:
        return None


def store(pattern: Pattern, value) -> None:
    """Keep what tracing found. A full disk or a value that cannot be written costs the next process a trace."""
    with contextlib.suppress(Exception):
        file = file_of(pattern)
        content = pickle.dumps(value)
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(content)
        scratch.replace(file)


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
    """The text behind a pattern: the files of its functions and of the functions and kernels that they use."""
    own = [*pattern.spellings, pattern.kernel_fn, pattern.backward_fn, pattern.saved_fn, pattern.guard_fn]
    pending, seen, texts = [f for f in own if f is not None], set(), set()
    while pending:
        fn = pending.pop()
        fn = getattr(fn, "fn", fn)  # a Triton kernel holds its function
        package = fn.__module__.removeprefix("fusion_backend.patterns").partition(".")[0]
        if fn in seen or package in ("torch", "triton", "fusion_backend"):
            continue  # other people's, in torch's own keys, or hashed as ours
        seen.add(fn)
        texts.add(text(fn))
        used = (fn.__globals__.get(name) for name in fn.__code__.co_names)
        pending += [u for u in used if isinstance(getattr(u, "fn", u), types.FunctionType)]
    return "\n".join(sorted(texts))


def text(fn: Callable) -> str:
    """The file that a function is in; its own source or code where there is no file (a notebook)."""
    file = fn.__code__.co_filename
    if Path(file).is_file():
        return Path(file).read_text()
    try:
        return inspect.getsource(fn)
    except (OSError, TypeError):
        return fn.__code__.co_code.hex() + repr(fn.__code__.co_consts)
