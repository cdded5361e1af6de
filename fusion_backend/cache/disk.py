"""Our JSON files next to Inductor's caches, among them the templates of patterns. Reading them runs
no code.

A file is read only where nobody else could have written it: folder and file belong to the user or
the administrator, and nobody else may write to them. A file that cannot be read, because of another
version or because it is incomplete, counts as missing.
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
from fusion_backend.ops.definition import Definition
from fusion_backend.reporting.report import warn_once


def file_of(pattern: Definition) -> Path | None:
    """The file of a pattern's templates. None if Inductor's caches are off or the pattern has no
    fingerprint that holds in every process.
    """
    folder, sources, print_ = cache_folder(), own_sources(), fingerprint(pattern)
    rules = fingerprint(foreign_rules())
    if folder is None or sources is None or print_.opaque or rules.opaque:
        return None
    # a template names its spelling by the line
    lines = [
        fn.__code__.co_firstlineno for fn in getattr(pattern, "spellings", [pattern.reference])
    ]
    digests = (sources, print_.digest, rules.digest)
    text = repr((digests, pattern.where, lines, torch_version(), sys.version))
    return (
        Path(folder)
        / "fusion"
        / f"{pattern.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    )


def load(file: Path | None) -> dict | None:
    """The value that was stored, or None."""
    with contextlib.suppress(Exception):
        return decoded(read(file, "traced patterns"))
    return None


def store(file: Path | None, value: dict) -> None:
    """Store a value. A full disk or a value that JSON cannot express is no error: the next process
    traces the pattern again.
    """
    with contextlib.suppress(Exception):
        write(file, encoded(value))


def read(file: Path | None, what: str):
    """The JSON in a file of ours; None if the file is missing or incomplete, or if somebody else
    could have written it. In that case a warning says that `what` is not read.
    """
    with contextlib.suppress(Exception):
        for path in (file.parent, file):
            if why := unsafe(path):
                told = f"fusion: {what} are not read from the cache: {why}"
                warn_once(f"{what} in {path.parent}", told)
                return None
        return json.loads(file.read_text())
    return None


def write(file: Path | None, value) -> None:
    """Write JSON to a file, whole or not at all. If that is impossible, nothing is written."""
    with contextlib.suppress(Exception):
        content = json.dumps(value)
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        if unsafe(file.parent):
            return
        # every process writes a file of its own; the last to rename it wins
        handle, scratch = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "w") as out:
                out.write(content)
            os.replace(scratch, file)
        except OSError:
            os.unlink(scratch)


def unsafe(path: Path) -> str:
    """Why another user could have written the file; "" if none could, or there is no file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    if not hasattr(os, "getuid"):
        return ""  # the platform has no such permissions
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user"
    return f"others may write to {path} (chmod go-w)" if found.st_mode & 0o022 else ""


# The format: a list of expressions, each after its operands, and a value that names expressions by
# their index in it. A value that JSON does not have is a list that begins with its kind.


class Encoder:
    """Builds the list of expressions that a value refers to."""

    def __init__(self):
        self.expressions: list[list] = []
        self.index: dict[Expr, int] = {}

    def index_of(self, root: Expr) -> int:
        """The index of an expression, which is added after its operands, without recursion."""
        pending = [root]
        while pending:
            e = pending[-1]
            missing = [a for a in e.args if a not in self.index]
            if e not in self.index and not missing:
                operands = [self.index[a] for a in e.args]
                entry = [e.op, operands, self.encode(e.attr), self.encode(e.shape), e.id]
                self.index[e] = len(self.expressions)
                self.expressions.append(entry)
            pending = [*pending, *missing] if missing else pending[:-1]
        return self.index[root]

    def encode(self, v):
        """A value as JSON. Raises TypeError if the format has no kind for it."""
        if v is None or type(v) in (bool, int, float, str):
            return v
        if type(v) is torch.dtype:
            return ["dtype", str(v).removeprefix("torch.")]
        if type(v) is Expr:
            return ["expression", self.index_of(v)]
        if type(v) is dict:
            return ["dict", *([self.encode(k), self.encode(w)] for k, w in v.items())]
        if type(v) in (tuple, list, set, torch.Size):
            kind = "tuple" if type(v) is torch.Size else type(v).__name__
            return [kind, *map(self.encode, v)]
        raise TypeError(f"no kind for {type(v).__name__}")


def encoded(value) -> dict:
    encoder = Encoder()
    return {"value": encoder.encode(value), "expressions": encoder.expressions}


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
