"""Removes measured answers, and carries them from one store to another in a file."""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path

from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.commands.gate_measured import line
from fusion_backend.frontends.commands.gate_store import (
    counted,
    elsewhere,
    for_whom,
    opened,
    resolved,
    stems,
)
from fusion_backend.measure.store import Answer, read_answers, write_answers

KEY = re.compile("[0-9a-f]{32}")  # it becomes the name of a file
BY_WHOM = re.compile(r"|\w+/\w+")


def clear(keys: list[str], everything: bool) -> str:
    """Forget these answers, or all. Returns what was removed. Raises Failure."""
    if bool(keys) == everything:
        wrong = "--all leaves no key to name" if keys else "it was not said which"
        raise Failure(f"{wrong}: name the keys that fusion gate list shows, or give --all alone", 2)
    held = opened(to_write=True)
    known = [*held.all()]
    chosen = known if everything else resolved(keys, known)
    damaged = stems(held) - {a.key for a in known} if everything else set()
    try:
        held.clear({*(a.key for a in chosen), *damaged})
    except OSError as error:
        raise Failure(f"cannot remove {error.filename}: {error.strerror}", 1) from error
    more = f" and {counted(len(damaged), 'damaged file')}" if damaged else ""
    done = f"{counted(len(chosen), 'answer')}{more} removed from {held.folder}"
    return "\n".join([*map(line, chosen), done])


def export(file: Path, keys: list[str]) -> str:
    """Write these answers, or all, into a file. Returns what was written. Raises Failure."""
    held = opened()
    known = [*held.all()]
    chosen = resolved(keys, known) if keys else known
    if not chosen:
        raise Failure(f"there is no answer to export in {held.folder}", 1)
    try:
        write_answers(file, chosen)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}", 2) from error
    return f"{for_whom(chosen)}, in {file}"


def read_in(file: Path) -> str:
    """Add the answers of a file to the store. Returns what is new. An answer is never replaced by
    one that is older or of the same day. Raises Failure, and adds nothing, if one of the file's
    answers is invalid.
    """
    given = answers_in(file)
    held = opened(to_write=True)
    new, newer, known = [], [], []
    for a in given:
        mine = held.get(a.key)
        if mine is not None and mine.date >= a.date:
            known.append(a)
            continue
        if why := held.put(a):
            told = f"after {counted(len(new) + len(newer), 'answer')}"
            raise Failure(f"cannot keep answers in {held.folder}, {told}: {why}", 1)
        (new if mine is None else newer).append(a)
    parts = [f"{len(new)} new", f"{len(newer)} newer than the known", f"{len(known)} known"]
    others = elsewhere(given)
    away = f"; {len(others)} of another GPU or version than are here" if others else ""
    return f"{counted(len(given), 'answer')} read: {', '.join(parts)}{away}\nfolder: {held.folder}"


def answers_in(file: Path) -> list[Answer]:
    """The answers of an exported file, each of which can be used. Raises Failure."""
    try:
        found = read_answers(file)
        for a in found:
            check(a)
    except OSError as error:
        raise Failure(f"cannot read {file}: {error.strerror}", 2) from error
    except (ValueError, OverflowError, RecursionError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise Failure(f"{file} is not what fusion gate export writes: {first}", 2) from error
    return found


def check(a: Answer) -> None:
    """Raises ValueError for an answer that no measurement can have left."""
    if not KEY.fullmatch(a.key):
        raise ValueError(f"{a.key!r} is no key")
    numbers = (a.plain_ms, a.ours_ms, a.ratio, a.low, a.high)
    if not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(f"{a.key}: a time or a ratio is no number, or negative")
    if not a.kept:
        raise ValueError(f"{a.key}: {a.verdict!r} is no verdict")
    if not all(map(BY_WHOM.fullmatch, a.take)):
        raise ValueError(f"{a.key}: it does not say who computes a site")
    if not all(isinstance(a.about.get(part), str) for part in ("gpu", "torch", "triton")):
        raise ValueError(f"{a.key}: it does not say of which GPU and versions it is")
    texts = (*a.sites, a.why, *map(str, (*a.about, *a.about.values())))
    if not all(text.isprintable() for text in texts):
        raise ValueError(f"{a.key}: a text in it has characters that cannot be printed")
    datetime.date.fromisoformat(a.date)
