"""What tracing found of a pattern, kept beside Inductor's caches: as JSON, which names values and
runs no code.

A file is read only where nobody else could have put it: folder and file are ours (or the
administrator's) and nobody else may write to them. Whatever cannot be read, of another version or
cut short, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import torch

from fusion_backend.cache.fingerprint import fingerprint
from fusion_backend.cache.identity import own_sources
from fusion_backend.compat.torch import cache_folder, torch_version
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import foreign_rules
from fusion_backend.ops.pattern import Pattern
from fusion_backend.reporting.report import warn_once


def file_of(pattern: Pattern) -> Path | None:
    """Where a traced pattern is kept; nowhere when Inductor's caches are off or nothing names it in
    every process.
    """
    folder, sources, print_ = cache_folder(), own_sources(), fingerprint(pattern)
    rules = fingerprint(foreign_rules())
    if folder is None or sources is None or print_.opaque or rules.opaque:
        return None
    # a template knows its spelling by the line
    lines = [fn.__code__.co_firstlineno for fn in pattern.spellings]
    digests = (sources, print_.digest, rules.digest)
    text = repr((digests, pattern.where, lines, torch_version(), sys.version))
    return (
        Path(folder)
        / "fusion"
        / f"{pattern.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    )


def load(file: Path | None) -> dict | None:
    """What was stored, or None."""
    with contextlib.suppress(Exception):
        for path in (file.parent, file):
            if why := unsafe(path):
                warn_once(
                    f"kept {path.parent}",
                    f"fusion: traced patterns are not read from the cache: {why}",
                )
                return None
        return decoded(json.loads(file.read_text()))
    return None


def store(file: Path | None, value: dict) -> None:
    """Keep what tracing found. A full disk or a value that cannot be written costs the next process
    a trace.
    """
    with contextlib.suppress(Exception):
        content = json.dumps(encoded(value))
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if unsafe(file.parent):
            return
        # several writers: each its own, the last one stays
        handle, scratch = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as out:
            out.write(content)
        os.replace(scratch, file)


def unsafe(path: Path) -> str:
    """Why somebody else could have written what is there; empty where nobody could, or nothing is
    there.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    if not hasattr(os, "getuid"):
        return ""  # no such permissions there
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user"
    return f"others may write to {path} (chmod go-w)" if found.st_mode & 0o022 else ""


# As JSON: a list of expressions, each after its operands, and values that name them by their place
# in it. What JSON has no form for is a list that begins with its kind.


def encoded(value) -> dict:
    expressions: list[list] = []
    places: dict[Expr, int] = {}

    def place(root: Expr) -> int:
        pending = [root]
        while pending:
            e = pending[-1]
            missing = [a for a in e.args if a not in places]
            if e not in places and not missing:
                places[e] = len(expressions)
                expressions.append(
                    [e.op, [places[a] for a in e.args], put(e.attr), put(e.shape), e.id]
                )
            pending = [*pending, *missing] if missing else pending[:-1]
        return places[root]

    def put(v):
        if v is None or type(v) in (bool, int, float, str):
            return v
        if type(v) is torch.dtype:
            return ["dtype", str(v).removeprefix("torch.")]
        if type(v) is Expr:
            return ["expression", place(v)]
        if type(v) is dict:
            return ["dict", *([put(k), put(w)] for k, w in v.items())]
        if type(v) in (tuple, list, set, torch.Size):
            return ["tuple" if type(v) is torch.Size else type(v).__name__, *map(put, v)]
        raise TypeError(f"{type(v).__name__} is not kept")

    return {"value": put(value), "expressions": expressions}


def decoded(text: dict):
    expressions: list[Expr] = []

    def get(v):
        if not isinstance(v, list):
            return v
        kind, *rest = v
        if kind == "dtype":
            found = getattr(torch, rest[0])
            if type(found) is not torch.dtype:
                raise TypeError(f"torch.{rest[0]} is no dtype")
            return found
        if kind == "expression":
            return expressions[rest[0]]
        if kind == "dict":
            return {get(k): get(w) for k, w in rest}
        return {"tuple": tuple, "list": list, "set": set}[kind](map(get, rest))

    for op, args, attr, shape, number in text["expressions"]:
        expressions.append(
            Expr(op, tuple(expressions[i] for i in args), get(attr), get(shape), number)
        )
    return get(text["value"])
