"""Measured answers, one file a class of regions, beside Inductor's caches; and the seed, answers
that ship with the package.

An answer is written to a file of its own, which is then renamed: a reader finds a whole answer or
none, even if processes run at the same time or are killed. A file that is not an answer counts as
missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fusion_backend.cache.disk import unsafe
from fusion_backend.compat.torch import cache_folder
from fusion_backend.reporting.report import warn_once

SEED = Path(__file__).parent / "seed.json"
FORMAT = 1
TODAY = "measured today"


def on_date(date: str) -> str:
    """How the report names the day of an older answer."""
    return f"measured on {date}"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was measured of one class of regions.

    key: a digest of the region, the GPU, the versions and the code of the kernels. sites: the
    patterns in it, in graph order. take: for each of them who computes it, "kernel/vjp" for the
    forward and the backward, or "" where Inductor does. plain_ms, ours_ms: the median device times
    of the region with all sites left to Inductor, and of the best replacement. ratio: the median of
    their ratios of one round each; low, high: the interval of that median, at 99 %. verdict:
    "faster", "same", "slower", "wrong" where a replacement computes something else, "failed" where
    its kernel does not run, or "" for undecided. more_bytes: what it keeps for backward beyond
    what Inductor keeps. why: of an answer without times. about, for people: the GPU, the versions,
    the mode, the operators of the region and the digest of its text, and the code that was timed
    (`code_of_each`). seed: it ships with the package.
    """

    key: str
    sites: tuple[str, ...]
    take: tuple[str, ...]
    plain_ms: float = 0.0
    ours_ms: float = 0.0
    ratio: float = 1.0
    low: float = 0.0
    high: float = 0.0
    verdict: str = ""
    more_bytes: int = 0
    why: str = ""
    date: str = ""
    about: dict = dataclasses.field(default_factory=dict)
    seed: bool = False

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        del fields["seed"]
        return json.dumps({"format": FORMAT, **fields})

    @property
    def kept(self) -> bool:
        """Would another process find the same? A kernel that failed here may run there."""
        return self.verdict in ("faster", "same", "slower", "wrong")

    @property
    def when(self) -> str:
        if self.seed:
            return f"measured on an {self.about.get('gpu', 'unknown GPU')}"
        today = datetime.date.today().isoformat()
        return TODAY if self.date == today else on_date(self.date)


TYPES = {
    "key": str,
    "plain_ms": float,
    "ours_ms": float,
    "ratio": float,
    "low": float,
    "high": float,
    "verdict": str,
    "more_bytes": int,
    "why": str,
    "date": str,
    "about": dict,
}


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is no JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def answer_of(content: object, seed: bool = False) -> Answer:
    """An answer from its JSON value. Raises ValueError where it is none."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is no measured answer of this version")
    given = {k: v for k, v in content.items() if k != "format"}
    try:
        given |= {k: float(given[k]) for k in TYPES if TYPES[k] is float}
        sites, take = tuple(given["sites"]), tuple(given["take"])
        found = Answer(**{**given, "sites": sites, "take": take, "seed": seed})
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is no measured answer: {error}") from error
    typed = all(isinstance(getattr(found, k), t) for k, t in TYPES.items())
    words = all(isinstance(s, str) for s in (*sites, *take))
    if not typed or not words or len(sites) != len(take):
        raise ValueError("it is no measured answer: a field is of another type")
    return found


class Store:
    """The answers of a folder; without a folder those of this process alone."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.known: dict[str, Answer] = {}  # also what cannot be written

    def get(self, key: str) -> Answer | None:
        if key not in self.known and (found := self.read(key)):
            self.known[key] = found
        return self.known.get(key)

    def read(self, key: str) -> Answer | None:
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        with contextlib.suppress(OSError, ValueError):
            for part in (self.folder, path):
                if why := unsafe(part):
                    told = f"fusion: measured answers are not read from the cache: {why}"
                    warn_once(f"answers in {self.folder}", told)
                    return None
            found = answer_of(parsed(path.read_text()))
            return found if found.key == key else None
        return None

    def put(self, answer: Answer) -> str:
        """Keep an answer. Returns why it is kept for this process alone, "" where it is not."""
        self.known[answer.key] = answer
        if self.folder is None:
            return "Inductor's caches are off"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := unsafe(self.folder):
                return why
            handle, scratch = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(handle, "w") as out:
                out.write(answer.to_json())
            os.replace(scratch, self.folder / f"{answer.key}.json")
        except OSError as error:
            return str(error)
        return ""

    @property
    def empty(self) -> bool:
        """Is there no answer at all, of whatever GPU?"""
        if self.known or self.folder is None:
            return not self.known
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            return not any(e.name.endswith(".json") for e in entries)
        return True

    def all(self) -> Iterator[Answer]:
        """Every answer, the latest first."""
        keys = {*self.known}
        if self.folder is not None and self.folder.is_dir():
            keys |= {f.stem for f in self.folder.glob("*.json")}
        found = (self.get(key) for key in sorted(keys))
        yield from sorted(filter(None, found), key=lambda a: a.date, reverse=True)

    def clear(self, keys: Iterable[str] | None = None) -> int:
        """Forget these answers, or all. Returns how many files were removed."""
        chosen = {a.key for a in self.all()} if keys is None else {*keys}
        removed = 0
        for key in chosen:
            self.known.pop(key, None)
            if self.folder is not None:
                path = self.folder / f"{key}.json"
                removed += path.exists()
                path.unlink(missing_ok=True)
        return removed


def read_answers(path: Path, seed: bool = False) -> list[Answer]:
    """The answers in a file that `write_answers` made. Raises OSError, and ValueError where it is
    no such file.
    """
    content = parsed(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("answers"), list):
        raise ValueError(f"{path} has no list of answers")
    return [answer_of(entry, seed) for entry in content["answers"]]


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """One JSON file, an answer a line, in the order of their keys."""
    lines = ",\n".join(a.to_json() for a in sorted(answers, key=lambda a: a.key))
    path.write_text(f'{{"answers": [\n{lines}\n]}}\n')


@functools.cache
def seed() -> dict[str, Answer]:
    """The answers that ship with the package, by key."""
    try:
        return {a.key: a for a in read_answers(SEED, seed=True)}
    except (OSError, ValueError):
        return {}


@functools.cache
def store_in(folder: str | None) -> Store:
    return Store(None if folder is None else Path(folder) / "fusion" / "measured")


def store() -> Store:
    """The answers of this user, beside Inductor's caches."""
    return store_in(cache_folder())
